"""The cost of each candidate of one decision, kept so that it can be explained later.

It holds what the choice was made from, not the terms: those are computed on request.
"""

from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from math import inf
from types import MappingProxyType
from typing import Final

from tandem_contract.fabric_classes import FabricClass
from tandem_contract.trace import CostTrace
from tandem_planner.cost import (
    CostTerms,
    PodFigures,
    RequestFigures,
    decode_terms,
    first_token_seconds,
    join_seconds,
    prefill_terms,
    transfer_seconds,
    unified_terms,
)

_TERMS: Final[Mapping[str, Callable[[RequestFigures, PodFigures, int], CostTerms]]] = {
    "unified": unified_terms,
    "prefill": prefill_terms,
}
"""Part of a cost, for which no other pod matters → its terms."""
_NO_FABRICS: Final[Mapping[int, tuple[FabricClass, ...]]] = MappingProxyType({})


Prediction = tuple[float, float, float]
"""When the first token of a request is expected, in seconds from its decision; the part of it that
is the hand-off; the part that passes on the decode pod after a hand-off."""


class CostRecord:
    """A decision by cost. `names`, `pods`, `cached` and `cached_if_computing` have one entry per
    pod of the fleet; pods are meant by their row."""

    __slots__ = (
        "cached",
        "cached_if_computing",
        "decode",
        "decodes",
        "fabric",
        "fabrics",
        "grouped",
        "names",
        "pods",
        "prefill",
        "prefills",
        "ready",
        "request",
    )

    def __init__(  # noqa: PLR0917 - what was known, in the order of the decision
        self,
        request: RequestFigures,
        names: Sequence[str],
        pods: Sequence[PodFigures],
        cached: Sequence[int],
        cached_if_computing: Sequence[int],
        decodes: Sequence[int],
        prefills: Sequence[int],
        decode: int,
        prefill: int | None,
        fabric: FabricClass = FabricClass.ELSEWHERE,
        fabrics: Mapping[int, tuple[FabricClass, ...]] = _NO_FABRICS,
        grouped: AbstractSet[int] = frozenset(),
        ready: float = inf,
    ) -> None:
        self.request, self.names, self.pods = request, names, pods
        self.cached, self.cached_if_computing = cached, cached_if_computing
        """As in `tandem_planner.choice.Candidates`."""
        self.decodes = decodes
        """The pods that could decode."""
        self.prefills = prefills
        """The pods that could prefill for others; empty: a split was out of the question."""
        self.decode = decode
        """The chosen pod."""
        self.prefill = prefill
        """The chosen prefill pod; None: no split."""
        self.fabric = fabric
        """The class of the chosen pair; of no meaning without a split."""
        self.fabrics = fabrics
        """Decode pod → the classes of its pairs; empty if no pair is nearer than others."""
        self.grouped = grouped
        """Those of `decodes` for which one of `prefills` could prefill."""
        self.ready = ready
        """As in `tandem_planner.choice.Choice`."""

    def predict(self) -> Prediction:
        """What is expected of the chosen pods."""
        request, pods, prefill = self.request, self.pods, self.prefill
        computing = self.decode if prefill is None else prefill
        cached = self.cached_if_computing[computing]
        ready = first_token_seconds(request, pods[computing], cached)
        if prefill is None:
            return ready, 0.0, 0.0
        decode, handoff = pods[self.decode], request.handoff
        join = join_seconds(request, decode, ready)
        transfer = transfer_seconds(request, decode, self.cached[self.decode], self.fabric)
        return ready + handoff + transfer + join, handoff, join

    @property
    def itl(self) -> float:
        """Seconds between two tokens that are expected of the chosen pod, with the decodes that run
        there already."""
        return self.pods[self.decode].step

    @property
    def prefill_seconds(self) -> float:
        """Predicted seconds of the prefill alone, on the pod that computes it."""
        if self.prefill is None:
            return self._terms("unified", self.decode).prefill
        return self._terms("prefill", self.prefill).prefill

    def traces(self) -> Sequence[CostTrace]:
        """Every candidate with its terms, the cheapest of each part first. A pod that may decode is
        there once alone, and once for each fabric class of its pairs."""
        is_split = self.prefill is not None
        chosen = None if is_split else self.decode
        parts = [[self._alone("unified", row, is_chosen=row == chosen) for row in self.decodes]]
        if self.prefills:
            parts.append(
                [
                    self._alone("prefill", row, is_chosen=row == self.prefill)
                    for row in self.prefills
                ]
            )
            chosen_pair = (self.decode, self.fabric) if is_split else None
            parts.append([
                self._decode(row, fabric, is_chosen=(row, fabric) == chosen_pair)
                for row in self.decodes
                if row in self.grouped
                for fabric in self.fabrics.get(row, (FabricClass.ELSEWHERE,))
            ])  # fmt: skip
        return [trace for part in parts for trace in sorted(part, key=lambda trace: trace.cost)]

    def _terms(self, part: str, row: int) -> CostTerms:
        return _TERMS[part](self.request, self.pods[row], self.cached_if_computing[row])

    def _decode_terms(self, row: int, fabric: FabricClass) -> CostTerms:
        return decode_terms(self.request, self.pods[row], self.cached[row], fabric, self.ready)

    def _alone(self, part: str, row: int, *, is_chosen: bool) -> CostTrace:
        terms = self._terms(part, row)
        return _trace(
            self.names[row], part, terms, self.cached_if_computing[row], is_chosen=is_chosen
        )

    def _decode(self, row: int, fabric: FabricClass, *, is_chosen: bool) -> CostTrace:
        return _trace(
            self.names[row],
            "decode",
            self._decode_terms(row, fabric),
            self.cached[row],
            fabric.word if self.fabrics else "",
            is_chosen=is_chosen,
        )


def _trace(
    name: str, part: str, terms: CostTerms, cached: int, fabric: str = "", *, is_chosen: bool
) -> CostTrace:
    return CostTrace(
        name,
        part,
        sum(terms),
        {term: seconds for term, seconds in terms._asdict().items() if seconds},
        cached,
        chosen=is_chosen,
        fabric=fabric,
    )
