"""The cost of each candidate of one decision, kept so that it can be explained later.

It holds what the choice was made from, not the terms: those are computed on request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from tandem_contract.trace import CostTrace
from tandem_planner.cost import (
    CostTerms,
    PodFigures,
    RequestFigures,
    decode_terms,
    prefill_terms,
    unified_terms,
)

_PARTS: Final = ("unified", "prefill", "decode")
_Terms = Callable[[RequestFigures, PodFigures, int], CostTerms]


@dataclass(frozen=True, slots=True)
class CostRecord:
    """A decision by cost. The sequences have one entry per pod."""

    request: RequestFigures
    names: Sequence[str]
    pods: Sequence[PodFigures]
    cached: Sequence[int]
    alone: Sequence[int]
    """As in `tandem_planner.choice.Candidates`."""
    decodes: Sequence[int]
    """Indices of the pods that could decode."""
    prefills: Sequence[int]
    """Indices of the pods that could prefill for others; empty: a split was out of the question."""
    decode: int
    """Index of the chosen pod."""
    prefill: int | None
    """Index of the chosen prefill pod; None: no split."""

    @property
    def first_token(self) -> float:
        """Predicted seconds until the first token."""
        if self.prefill is None:
            return self._alone(self.decode).first_token
        return (
            self._terms(prefill_terms, self.prefill).first_token
            + self._terms(decode_terms, self.decode).first_token
        )

    @property
    def prefill_seconds(self) -> float:
        """Predicted seconds of the prefill alone, on the pod that computes it."""
        if self.prefill is None:
            return self._alone(self.decode).prefill
        return self._terms(prefill_terms, self.prefill).prefill

    def traces(self) -> Sequence[CostTrace]:
        """Every candidate with its terms, the cheapest of each part first."""
        is_split = self.prefill is not None
        traces = [
            self._trace(
                i, "unified", self.alone, unified_terms, is_chosen=not is_split and i == self.decode
            )
            for i in self.decodes
        ]
        traces += [
            self._trace(i, "prefill", self.cached, prefill_terms, is_chosen=i == self.prefill)
            for i in self.prefills
        ]
        if self.prefills:
            traces += [
                self._trace(
                    i, "decode", self.cached, decode_terms, is_chosen=is_split and i == self.decode
                )
                for i in self.decodes
            ]
        return sorted(traces, key=lambda trace: (_PARTS.index(trace.part), trace.cost))

    def _alone(self, index: int) -> CostTerms:
        return unified_terms(self.request, self.pods[index], self.alone[index])

    def _terms(self, terms: _Terms, index: int) -> CostTerms:
        return terms(self.request, self.pods[index], self.cached[index])

    def _trace(
        self, index: int, part: str, cached: Sequence[int], terms: _Terms, *, is_chosen: bool
    ) -> CostTrace:
        cost = terms(self.request, self.pods[index], cached[index])
        return CostTrace(
            self.names[index],
            part,
            sum(cost),
            {name: seconds for name, seconds in cost._asdict().items() if seconds},
            cached[index],
            chosen=is_chosen,
        )
