"""Kubernetes' quantities: `500m`, `2`, `1Gi`. Pure."""

import re
from decimal import Decimal
from typing import Any, Final

_QUANTITY: Final = re.compile(
    r"([+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+))(?:[eE]([+-]?[0-9]+)|([numkMGTPE]|[KMGTPE]i)?)"
)
_SUFFIX: Final = {
    "n": Decimal(10) ** -9, "u": Decimal(10) ** -6, "m": Decimal(10) ** -3,
    **{s: Decimal(1000) ** (i + 1) for i, s in enumerate("kMGTPE")},
    **{f"{s}i": Decimal(1024) ** (i + 1) for i, s in enumerate("KMGTPE")},
}  # fmt: skip


def quantity(text: Any) -> Decimal | None:
    """A Kubernetes quantity as a number; None when the text is no quantity."""
    match = _QUANTITY.fullmatch(str(text))
    if match is None:
        return None
    number, exponent, suffix = match.groups()
    return Decimal(number) * (Decimal(10) ** int(exponent or 0)) * _SUFFIX.get(suffix, Decimal(1))
