"""The pods that may serve a model, which of them can exchange KV, and over which fabric class, as
rows of the fleet's figures.

A layout is computed once per change of the pods, and narrowed for a request that may go to some of
them only, as with a gateway's subset hint.
"""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final

from tandem_contract.fabric_classes import FabricClass
from tandem_contract.paths import Role
from tandem_planner.fabrics import Place, fabric_class
from tandem_planner.groups import Group, make_group

from ..backends.fleet import Fleet
from ..backends.pairing import can_hand_off, can_prefill_for, pairing_key
from ..backends.pods import Pod

MAX_NARROWED: Final = 64
"""Narrowed layouts that are kept. Too low: with more hints than this in turn, each request waits
for its layout, up to 0.1 ms at 100 pods."""


@dataclass(frozen=True, slots=True)
class CandidateLayout:
    """The pods that may serve a request. Pods are meant by their row."""

    rows: tuple[int, ...]
    """All of these pods."""
    decodes: tuple[int, ...]
    """Those that may decode."""
    groups: tuple[Group, ...]
    prefills: tuple[int, ...]
    """All pods of `groups` that prefill."""
    grouped: frozenset[int]
    """Decode pods that are in a group."""
    is_decode: tuple[bool, ...]
    """Of each row of the fleet, whether other pods are there to prefill for it."""
    fabrics: Mapping[int, tuple[FabricClass, ...]]
    """Decode pod in a group → the classes of its pairs; empty if no pair is nearer than others."""
    places: tuple[Place, ...] | None
    """Of each row of the fleet; None: not known of any."""

    def within(self, allowed: AbstractSet[int]) -> "CandidateLayout":
        """The same for those of the pods that are `allowed`."""
        pairs = (
            (
                [row for row in group.prefills if row in allowed],
                [row for row in group.decodes if row in allowed],
            )
            for group in self.groups
        )
        groups = _groups(pairs, self.places)
        return CandidateLayout(
            tuple(row for row in self.rows if row in allowed),
            tuple(row for row in self.decodes if row in allowed),
            groups,
            *_members(groups),
            self.is_decode,
            _fabrics(groups),
            self.places,
        )


def make_layout(fleet: Fleet, ready: tuple[Pod, ...], model: str | None) -> CandidateLayout:
    """The layout of the pods `ready` of `fleet`, which may serve `model`."""
    row_of, allowed = fleet.figures.rows, frozenset(ready)
    decodes = [pod for pod in ready if pod.backend.role.serves(Role.DECODE)]
    partners: dict[object, tuple[int, ...]] = {}
    members: dict[tuple[int, ...], list[int]] = {}
    for decode in decodes:
        # Once per key, not per pod: a hundred alike pods have one key.
        key = (pairing_key(decode), frozenset(decode.unwarmed_prefills))
        if (prefills := partners.get(key)) is None:
            prefills = partners[key] = tuple(
                row_of[pod]
                for pod in fleet.prefill_candidates(model, decode)
                if pod in allowed and can_hand_off(pod, decode)
            )
        members.setdefault(prefills, []).append(row_of[decode])
    places = tuple(pod.place for pod in fleet)
    known = places if any(place != Place() for place in places) else None
    groups = _groups(members.items(), known)
    return CandidateLayout(
        tuple(row_of[pod] for pod in ready),
        tuple(row_of[pod] for pod in decodes),
        groups,
        *_members(groups),
        tuple(pod.estimates.is_decode for pod in fleet),
        _fabrics(groups),
        known,
    )


def partner_fabrics(fleet: Fleet, decode: Pod) -> frozenset[FabricClass]:
    """The classes of the pairs of `decode` with all pods, ready or not, that may prefill for it."""
    return frozenset(
        fabric_class(pod.place, decode.place) for pod in fleet if can_prefill_for(pod, decode)
    )


class NarrowedLayouts:
    """The narrowed layouts that were used last: a gateway repeats its subset hints."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[object, AbstractSet[int]], CandidateLayout] = {}
        """The one used last comes last."""

    def within(
        self, key: object, whole: CandidateLayout, allowed: frozenset[int]
    ) -> CandidateLayout:
        """`whole.within(allowed)`; `key` stands for `whole`."""
        layout = self._layouts.pop((key, allowed), None) or whole.within(allowed)
        self._layouts[key, allowed] = layout
        if len(self._layouts) > MAX_NARROWED:
            del self._layouts[next(iter(self._layouts))]
        return layout

    def clear(self) -> None:
        """The pods changed."""
        self._layouts.clear()


def _groups(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]], places: Sequence[Place] | None
) -> tuple[Group, ...]:
    return tuple(
        make_group(tuple(prefills), tuple(decodes), places)
        for prefills, decodes in pairs
        if prefills and decodes
    )


def _members(groups: tuple[Group, ...]) -> tuple[tuple[int, ...], frozenset[int]]:
    """All pods of `groups` that prefill, and all that decode."""
    return (
        tuple(sorted({row for group in groups for row in group.prefills})),
        frozenset(row for group in groups for row in group.decodes),
    )


def _fabrics(groups: tuple[Group, ...]) -> Mapping[int, tuple[FabricClass, ...]]:
    """Decode pod → the classes of its pairs; empty if all pairs are ELSEWHERE."""
    fabrics = {
        row: classes
        for group in groups
        for row, classes in zip(group.decodes, group.pair_classes(), strict=True)
    }
    return fabrics if {*fabrics.values()} - {(FabricClass.ELSEWHERE,)} else {}
