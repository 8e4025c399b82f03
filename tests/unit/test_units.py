"""Sizes as they are typed and printed."""

from __future__ import annotations

import pytest

from pyalloc.common import units
from pyalloc.errors import UsageError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("24GB", 24 << 30),
        ("512MiB", 512 << 20),
        ("1.5g", 3 << 29),
        ("100", 100),
        ("1 B", 1),
        (" 2 tb ", 2 << 40),
    ],
)
def test_sizes_are_read_as_a_card_names_them(text: str, expected: int) -> None:
    assert units.parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "GB", "-1GB", "0", "12XB", "1e9", "9" * 400 + "GB", "8\u212a"]
)
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a size"):
        units.parse_bytes(text)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (512, "0.5 KiB"),
        (2**20 - 512, "1023.5 KiB"),
        (2**20 - 52, "1023.9 KiB"),
        (2**20 - 51, "1.0 MiB"),
        (2**20, "1.0 MiB"),
        (2**30 - 2**19, "1023.5 MiB"),
        (2**30 - 1, "1.00 GiB"),
        (2**30, "1.00 GiB"),
        (-(2**20), "-1.0 MiB"),
        (-(2**31), "-2.00 GiB"),
    ],
)
def test_sizes_are_told_in_the_unit_a_person_would_take(value: int, text: str) -> None:
    assert units.size(value) == text
