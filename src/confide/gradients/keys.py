"""Randomness by address: every (stream, step, query) has its own keyed counter stream."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

_SECRET_BYTES = 32
_BLOCK_WORDS = 2  # an AES block is 128 bits


@dataclass(frozen=True)
class KeyStream:
    """Uniform 64-bit words that nobody without the key can tell from random ones: AES-256, counter mode.

    Word i is a function of the key and i alone (NIST SP 800-38A), so parts of the stream can be read in
    any order and on any thread.

    Attributes:
        key: 32 bytes; left out of `repr`.
    """

    key: bytes = field(repr=False)

    def words(self, first: int, count: int) -> npt.NDArray[np.uint64]:
        """Words `first` … `first + count − 1`; `first` is even."""
        return next(self.blocks(first, count + count % 2))[:count]

    def blocks(self, first: int, size: int) -> Iterator[npt.NDArray[np.uint64]]:
        """Words from `first` on, `size` at a time, both even; each array overwrites the one before."""
        if first % _BLOCK_WORDS or size % _BLOCK_WORDS:
            raise ValueError("words are read in whole blocks of two")
        counter = (first // _BLOCK_WORDS).to_bytes(16, "big")
        encryptor = Cipher(algorithms.AES256(self.key), modes.CTR(counter)).encryptor()
        zeros, buffer = bytes(8 * size), bytearray(8 * size + 15)
        words = np.frombuffer(buffer, dtype="<u8", count=size)
        while True:
            encryptor.update_into(zeros, buffer)
            yield words


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

    def generator(self, stream: str, step: int, query: str) -> KeyStream:
        """The stream at an address: replay is identical, and no two addresses share a stream.

        Its key is a keyed hash of the address (BLAKE2b, RFC 7693), so what is drawn at one address says
        nothing about another.

        Args:
            stream: name of the stream, or of the draw.
            step: step of the schedule.
            query: what is drawn there.
        """
        address = b"".join(
            len(part).to_bytes(8, "big") + part
            for part in (stream.encode(), str(int(step)).encode(), query.encode())
        )
        digest = hashlib.blake2b(
            address, digest_size=_SECRET_BYTES, key=self.secret, person=b"confide.address"
        )
        return KeyStream(digest.digest())


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
