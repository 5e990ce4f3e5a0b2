"""Numbers keep three digits, and a small share never becomes nothing."""

import pytest

from tandem_loadtest.html import units


def spaced(text: str) -> str:
    return text.replace("\N{NO-BREAK SPACE}", " ")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 ms"),
        (0.00085, "0.85 ms"),
        (0.0123, "12.3 ms"),
        (0.482, "482 ms"),
        (1.0, "1 s"),
        (1.234, "1.23 s"),
        (75.5, "75.5 s"),
        (4321.0, "4,321 s"),
        (-0.0123, "-12.3 ms"),
    ],
)
def test_seconds(value: float | None, text: str) -> None:
    assert spaced(units.seconds(value)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (0.0, "0 %"),
        (1e-6, "< 0.1 %"),
        (0.0734, "7.3 %"),
        (0.06, "6 %"),
        (0.99999, "> 99.9 %"),
        (1.0, "100 %"),
    ],
)
def test_share(value: float | None, text: str) -> None:
    assert spaced(units.share(value)) == text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.05, "s", "50 ms"),
        (0.5, "share", "50 %"),
        (1234.5, "tokens/s", "1,234 tokens/s"),
        (3.14159, "", "3.14"),
    ],
)
def test_quantity(value: float, unit: str, text: str) -> None:
    assert spaced(units.quantity(value, unit)) == text
