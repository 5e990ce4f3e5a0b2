"""Why a decision fell as it did, as lines of text: the predicted costs and what became of them.
Pure."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

from tandem_contract.fabric_classes import FabricClass
from tandem_contract.trace import CostTrace, DecisionTrace

SHOWN: Final = 3
"""Candidates shown of each part; all are in the JSON output."""
_NEAR: Final = {
    FabricClass.SAME_NODE.word: "on the same node",
    FabricClass.SAME_DOMAIN.word: "in the same domain",
    FabricClass.ELSEWHERE.word: "elsewhere",
}
"""Fabric class → where the prefill pod of such a pair runs."""


def cost_lines(costs: Sequence[CostTrace]) -> Iterator[str]:
    """One line for each of the cheapest candidates of each part, always with the chosen one."""
    for part, group in groupby(costs, key=lambda cost: cost.part):
        candidates = list(group)
        shown = [c for i, c in enumerate(candidates) if i < SHOWN or c.chosen]
        for candidate in shown:
            yield f"  {part:8} {_cost(candidate)}"
        if others := len(candidates) - len(shown):
            yield f"  {part:8} {others} more cost more; --json prints them"


def first_token(trace: DecisionTrace) -> str:
    """The measured time to the first token beside the predicted one; empty without either."""
    measured, predicted = trace.measured_ttft, trace.predicted_ttft
    if measured is None:
        return "" if predicted is None else f"predicted  first token after {seconds(predicted)}"
    text = f"first token after {seconds(measured)}"
    if predicted is None or measured <= 0:
        return text
    error = (predicted - measured) / measured
    overhead = f" with {seconds(trace.overhead)} of overhead" if trace.overhead else ""
    return (
        f"{text}; predicted {seconds(predicted)}{overhead} ({abs(error):.0%} {_direction(error)})"
    )


def seconds(value: float) -> str:
    """A duration with a suitable unit."""
    return f"{value * 1000:.1f} ms" if value < 1 else f"{value:.2f} s"


def _cost(candidate: CostTrace) -> str:
    chosen = "chosen, " if candidate.chosen else ""
    cached = f", {candidate.cached_tokens} tokens cached" if candidate.cached_tokens else ""
    # A word that this version does not know is better than none.
    near = f", prefill {_NEAR.get(candidate.fabric, candidate.fabric)}" if candidate.fabric else ""
    terms = " + ".join(f"{name} {seconds(value)}" for name, value in candidate.terms.items())
    return f"{candidate.pod}: {chosen}cost {seconds(candidate.cost)} = {terms or 0}{cached}{near}"


def _direction(error: float) -> str:
    return "too low" if error < 0 else "too high"
