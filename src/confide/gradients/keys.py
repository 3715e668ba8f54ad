"""Randomness by address: every (stream, step, query) has its own keyed counter stream."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field

import numpy as np

_SECRET_BYTES = 32


@dataclass(frozen=True)
class Key:
    """A master key. Noise and sampling have one each; both are private and never leave the run.

    Attributes:
        secret: 32 bytes; left out of `repr`.
        simulated: whether the key can be guessed. A run with such a key claims nothing.
    """

    secret: bytes = field(repr=False)
    simulated: bool

    def __post_init__(self) -> None:
        if len(self.secret) != _SECRET_BYTES:
            raise ValueError(f"a key has {_SECRET_BYTES} bytes, not {len(self.secret)}")

    @classmethod
    def fresh(cls) -> Key:
        """256 bits from the operating system."""
        return cls(os.urandom(_SECRET_BYTES), simulated=False)

    @classmethod
    def fixed(cls, seed: int) -> Key:
        """The same key for the same `seed`: makes a run a simulation."""
        secret = hashlib.blake2b(str(int(seed)).encode(), digest_size=_SECRET_BYTES, person=b"confide.seed")
        return cls(secret.digest(), simulated=True)

    def generator(self, stream: str, step: int, query: str) -> np.random.Generator:
        """The Philox stream at an address: replay is identical, and no two addresses share a stream.

        The 128-bit Philox key is a keyed hash of the address, so what is drawn at one address says
        nothing about another (Salmon et al. 2011; BLAKE2, RFC 7693).

        Args:
            stream: name of the stream, or of the draw.
            step: step of the schedule.
            query: what is drawn there.
        """
        address = b"".join(
            len(part).to_bytes(8, "big") + part
            for part in (stream.encode(), str(int(step)).encode(), query.encode())
        )
        digest = hashlib.blake2b(address, digest_size=16, key=self.secret, person=b"confide.address")
        return np.random.Generator(np.random.Philox(key=int.from_bytes(digest.digest(), "big")))


@dataclass(frozen=True)
class Keys:
    """The two master keys of a run, independent of each other."""

    noise: Key
    sampling: Key

    @classmethod
    def fresh(cls) -> Keys:
        """Both from the operating system."""
        return cls(Key.fresh(), Key.fresh())

    @classmethod
    def fixed(cls, seed: int) -> Keys:
        """Both from `seed`: a simulation."""
        return cls(Key.fixed(2 * seed), Key.fixed(2 * seed + 1))

    @property
    def simulated(self) -> bool:
        """Whether either key can be guessed; then the run claims nothing."""
        return self.noise.simulated or self.sampling.simulated
