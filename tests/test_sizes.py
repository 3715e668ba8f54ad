"""Sizes as people write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from confide.errors import ConfigError
from confide.sizes import bytes_of


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1B", 1),
        ("3KB", 3000),
        ("500MB", 500_000_000),
        ("1.5GB", 1_500_000_000),
        ("2KiB", 2048),
        ("8MiB", 8 << 20),
        (" 8GiB ", 8 << 30),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert bytes_of(text, "memory") == size


@given(st.integers(1, 10**6), st.sampled_from(["K", "M", "G"]))
def test_decimal_units_are_smaller(count: int, prefix: str) -> None:
    assert bytes_of(f"{count}{prefix}B", "memory") < bytes_of(f"{count}{prefix}iB", "memory")


@pytest.mark.parametrize("text", ["", "lots", "8 gigs", "0GB", "-1MB", "1e3MB", "5", "5gb", "nanGB", "0.2B"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--memory is a size such as 5GB or 500MiB, not "):
        bytes_of(text, "--memory")
