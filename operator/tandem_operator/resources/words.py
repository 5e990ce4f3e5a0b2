"""What is wrong between pools, in a line for the person who wrote them."""

import json
from typing import Any

from .inherit import Mismatch
from .schema import Problem


def contradiction(mismatch: Mismatch, decode: str, prefill: str, where: str = "") -> str:
    """Field, both values and the fix, for pools called `decode` and `prefill`; `where` says at what
    line of which file the latter's value is."""
    advice = mismatch.advice or f"leave it out of {decode} to inherit it, or change it in both"
    return (
        f"{mismatch.field} is {_said(mismatch.decode)} here and {_said(mismatch.prefill)} in"
        f" {prefill}{where}: both sides of a hand-off must agree; {advice}"
    )


def refused(problem: Problem) -> str:
    """What the engine cannot do: field and fix."""
    field = ".".join(str(step) for step in problem.path[1:])
    return f"{field}: {problem.message}"


def _said(value: Any) -> str:
    return "left out" if value is None else json.dumps(value, ensure_ascii=False)
