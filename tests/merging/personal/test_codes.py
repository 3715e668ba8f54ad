from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from confide.merging.personal.codes import pack, packed_size, quantise, restore, unpack

finite = st.floats(-(2.0**60), 2.0**60, width=32, allow_subnormal=False)


@given(st.lists(st.integers(0, 3), max_size=70))
def test_packing_round_trip(codes: list[int]) -> None:
    packed = pack(np.array(codes, np.uint8))
    assert packed.nbytes == packed_size(len(codes)) == (2 * len(codes) + 7) // 8
    assert unpack(packed, len(codes)).tolist() == codes


def test_the_first_code_is_in_the_lowest_bits() -> None:
    assert pack(np.array([1, 2, 3, 0, 2], np.uint8)).tolist() == [0b00_11_10_01, 0b10]


def test_four_groups_by_hand() -> None:
    packed, scales = quantise(np.array([1.0, 7, -3, 0, 5, -4, 2]))
    # Positive (0 counts): 0 1 2 5 7, median 2, so 5 and 7 are upper. Negative: 3 4, median 3.5.
    assert unpack(packed, 7).tolist() == [0, 2, 1, 0, 2, 3, 0]
    expected = [np.sqrt((0 + 1 + 4) / 3), 3, np.sqrt((25 + 49) / 2), 4]
    np.testing.assert_allclose(scales, expected, rtol=1e-7)
    signed = [expected[0], expected[2], -3, expected[0], expected[2], -4, expected[0]]
    np.testing.assert_allclose(restore(packed, scales, 7), signed, rtol=1e-7)


@given(arrays(np.float32, array_shapes(max_dims=3, max_side=9), elements=finite))
def test_rms_keeps_the_norm_and_the_signs(values: np.ndarray) -> None:
    packed, scales = quantise(values)
    restored = restore(packed, scales, values.size)
    norm = np.linalg.norm(values.astype(float))
    assert np.linalg.norm(restored.astype(float)) == pytest.approx(norm, rel=1e-6, abs=1e-30)
    assert (np.sign(restored) * np.sign(values.reshape(-1)) >= 0).all()
    assert len(np.unique(restored)) <= 4
    # Nothing smaller in magnitude is given a larger value of the same sign.
    for side in (values.reshape(-1) >= 0, values.reshape(-1) < 0):
        order = np.argsort(np.abs(values.reshape(-1)[side]), kind="stable")
        assert (np.diff(np.abs(restored[side][order])) >= 0).all()


def test_equal_magnitudes_and_zeros_are_exact() -> None:
    values = np.array([0.5, -0.5, 0.5, -0.5, -0.5])
    assert restore(*quantise(values), 5).tolist() == values.tolist()
    assert restore(*quantise(np.zeros(6)), 6).tolist() == [0] * 6
    assert restore(*quantise(np.empty(0)), 0).size == 0
