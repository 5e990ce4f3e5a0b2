"""What is wrong between pools, in a line for the person who wrote them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from .inherit import Mismatch

_NOT_YET: Final = frozenset({"storage", "p2p-nccl"})
"""Connectors the CRD names and this release renders no command line for."""


def contradiction(mismatch: Mismatch, decode: str, prefill: str, where: str = "") -> str:
    """Field, both values and the fix, for pools called `decode` and `prefill`; `where` says at what
    line of which file the latter's value is."""
    advice = mismatch.advice or f"leave it out of {decode} to inherit it, or change it in both"
    return (
        f"{mismatch.field} is {_said(mismatch.decode)} here and {_said(mismatch.prefill)} in"
        f" {prefill}{where}: both sides of a hand-off must agree; {advice}"
    )


def not_rendered(spec: Mapping[str, Any]) -> Iterator[str]:
    """Connectors that this release makes no pods for."""
    transfer = spec.get("transfer", {})
    chained = [link["connector"] for link in transfer.get("connectors", ())]
    for connector in (transfer.get("connector"), *chained):
        if connector in _NOT_YET:
            yield f"{connector} is not available in this release: use nixl"


def _said(value: Any) -> str:
    return "left out" if value is None else json.dumps(value, ensure_ascii=False)
