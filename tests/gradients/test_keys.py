from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.gradients.keys import Key, Keys, KeyStream

ADDRESS = st.tuples(st.text(max_size=6), st.integers(0, 12), st.text(max_size=6))


def test_keystream_is_aes_256_in_counter_mode() -> None:
    # NIST SP 800-38A, F.5.5, shifted to a zero counter: the keystream is AES(key, counter), so
    # the first block must be the AES-256 encryption of zero (FIPS 197 key 00..1f, checked by hand below).
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

    key = bytes(range(32))
    block = Cipher(algorithms.AES256(key), modes.ECB()).encryptor()
    expected = block.update((0).to_bytes(16, "big") + (1).to_bytes(16, "big") + (2**63).to_bytes(16, "big"))
    words = np.frombuffer(expected, "<u8")
    stream = KeyStream(key)
    assert np.array_equal(stream.words(0, 4), words[:4])
    assert np.array_equal(stream.words(2, 2), words[2:4])
    assert np.array_equal(stream.words(1 << 64, 2), words[4:])


def test_words_do_not_depend_on_how_they_are_read() -> None:
    stream = Key.fixed(3).generator("s", 1, "q")
    whole = stream.words(0, 1000)
    assert np.array_equal(whole, np.concatenate([stream.words(0, 600), stream.words(600, 400)]))
    blocks = stream.blocks(0, 10)
    assert np.array_equal(whole, np.concatenate([next(blocks).copy() for _ in range(100)]))
    with pytest.raises(ValueError, match="whole blocks"):
        stream.words(1, 2)


@given(ADDRESS, ADDRESS)
def test_streams_are_equal_exactly_at_equal_addresses(one: tuple, other: tuple) -> None:
    key = Key.fixed(0)
    same = np.array_equal(key.generator(*one).words(0, 4), key.generator(*other).words(0, 4))
    assert same == (one == other)


def test_address_parts_do_not_run_together() -> None:
    key = Key.fixed(0)
    assert key.generator("ab", 1, "c") != key.generator("a", 1, "bc")
    assert key.generator("a", 11, "b") != key.generator("a1", 1, "b")


def test_fresh_keys_differ_and_claim() -> None:
    one, two = Keys.fresh(), Keys.fresh()
    assert len({one.noise.secret, one.sampling.secret, two.noise.secret, two.sampling.secret}) == 4
    assert not one.simulated


def test_fixed_keys_repeat_differ_from_each_other_and_claim_nothing() -> None:
    keys = Keys.fixed(5)
    assert keys == Keys.fixed(5)
    assert keys.simulated
    assert len({k.secret for s in range(-3, 4) for k in (Keys.fixed(s).noise, Keys.fixed(s).sampling)}) == 14


def test_secrets_are_not_printed() -> None:
    keys = Keys.fixed(1)
    stream = keys.noise.generator("a", 0, "b")
    shown = repr(keys) + str(keys) + repr(stream) + f"{keys.noise}"
    for secret in (keys.noise.secret, keys.sampling.secret, stream.key):
        assert repr(secret)[2:12] not in shown
        assert secret.hex()[:8] not in shown


def test_short_secret_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Key(b"short", simulated=False)
