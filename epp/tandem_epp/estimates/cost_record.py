"""The cost of each candidate of one decision, kept so that it can be explained later.

It holds what the choice was made from, not the terms: those are computed on request.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple

from tandem_contract.trace import CostTrace
from tandem_planner.cost import (
    CostTerms,
    PodFigures,
    RequestFigures,
    decode_terms,
    prefill_terms,
    unified_terms,
)

_TERMS: Final[Mapping[str, Callable[[RequestFigures, PodFigures, int], CostTerms]]] = {
    "unified": unified_terms,
    "prefill": prefill_terms,
    "decode": decode_terms,
}
"""Part of a cost → its terms."""


class CostRecord(NamedTuple):
    """A decision by cost. `names`, `pods`, `cached` and `alone` have one entry per pod of the
    fleet; pods are meant by their row."""

    request: RequestFigures
    names: Sequence[str]
    pods: Sequence[PodFigures]
    cached: Sequence[int]
    alone: Sequence[int]
    """As in `tandem_planner.choice.Candidates`."""
    decodes: Sequence[int]
    """The pods that could decode."""
    prefills: Sequence[int]
    """The pods that could prefill for others; empty: a split was out of the question."""
    decode: int
    """The chosen pod."""
    prefill: int | None
    """The chosen prefill pod; None: no split."""

    @property
    def first_token(self) -> float:
        """Predicted seconds until the first token."""
        if self.prefill is None:
            return self._terms("unified", self.decode).first_token
        return (
            self._terms("prefill", self.prefill).first_token
            + self._terms("decode", self.decode).first_token
        )

    @property
    def prefill_seconds(self) -> float:
        """Predicted seconds of the prefill alone, on the pod that computes it."""
        if self.prefill is None:
            return self._terms("unified", self.decode).prefill
        return self._terms("prefill", self.prefill).prefill

    def traces(self) -> Sequence[CostTrace]:
        """Every candidate with its terms, the cheapest of each part first."""
        is_split = self.prefill is not None
        parts = [("unified", self.decodes, None if is_split else self.decode)]
        if self.prefills:
            parts.append(("prefill", self.prefills, self.prefill))
            parts.append(("decode", self.decodes, self.decode if is_split else None))
        traces: list[CostTrace] = []
        for part, which, chosen in parts:
            of_part = [self._trace(part, row, is_chosen=row == chosen) for row in which]
            traces += sorted(of_part, key=lambda trace: trace.cost)
        return traces

    def _terms(self, part: str, row: int) -> CostTerms:
        return _TERMS[part](self.request, self.pods[row], self._cached(part, row))

    def _cached(self, part: str, row: int) -> int:
        """Tokens of the prompt that count as cached on the pod in this part."""
        return (self.cached if part == "decode" else self.alone)[row]

    def _trace(self, part: str, row: int, *, is_chosen: bool) -> CostTrace:
        cost = self._terms(part, row)
        return CostTrace(
            self.names[row],
            part,
            sum(cost),
            {name: seconds for name, seconds in cost._asdict().items() if seconds},
            self._cached(part, row),
            chosen=is_chosen,
        )
