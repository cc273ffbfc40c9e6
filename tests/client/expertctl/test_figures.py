"""Numbers as people read them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl import figures


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (20_736, "20.2 KiB"),
        (995_328, "972 KiB"),
        (1024 * 1024 - 1, "1.00 MiB"),
        (1_500_000_000, "1.40 GiB"),
        (24 * 2**30, "24.0 GiB"),
        (5 * 2**60, "5120 PiB"),
    ],
)
def test_sizes_are_binary_with_three_digits(nbytes: int, text: str) -> None:
    assert figures.size(nbytes) == text


@given(st.integers(0, 2**60))
def test_a_size_is_short_and_close_to_the_bytes(nbytes: int) -> None:
    text = figures.size(nbytes)
    number, unit = text.split()
    factor = 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit)

    assert len(text) <= 9
    assert abs(float(number) * factor - nbytes) <= max(nbytes * 0.01, 0.5)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0.0 ms"),
        (0.00021, "0.2 ms"),
        (0.9996, "1.00 s"),
        (12.304, "12.30 s"),
        (59.999, "1m00s"),
        (185, "3m05s"),
        (7800, "2h10m"),
        (90_000, "1d01h"),
    ],
)
def test_durations_change_their_unit(value: float, text: str) -> None:
    assert figures.seconds(value) == text


def test_a_share_of_nothing_is_not_a_number() -> None:
    assert figures.share(0, 0) == "-"
    assert figures.share(1, 3) == "33.3%"


@pytest.mark.parametrize(("part", "filled"), [(-1, 0), (0, 0), (50, 5), (100, 10), (250, 10)])
def test_a_bar_never_leaves_its_width(part: int, filled: int) -> None:
    assert figures.bar(part, 100, 10) == "█" * filled + "░" * (10 - filled)


def test_a_bar_of_nothing_is_empty() -> None:
    assert figures.bar(5, 0, 4) == "░░░░"
