"""The pods that may serve a model, which of them can exchange KV, and over which fabric class, as
rows of the fleet's figures.

A layout is computed once per change of the pods, and narrowed for a request that may go to some of
them only, as with a gateway's subset hint.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from tandem_contract.fabric_classes import FabricClass
from tandem_contract.paths import Role
from tandem_planner.fabrics import Place, fabric_class
from tandem_planner.groups import Group, make_group

from ..backends.fleet import Fleet
from ..backends.pairing import are_alike_unified, can_hand_off, can_prefill_for, pairing_key
from ..backends.pods import Pod

K = TypeVar("K")
V = TypeVar("V")

MAX_NARROWED: Final = 64
"""Subset hints of which pods and layouts are kept. Too low: with more hints than this in turn, each
request waits for its layout, up to 0.1 ms at 100 pods."""


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
    unified: frozenset[int]
    """Those of `rows` that do both."""
    is_decode: tuple[bool, ...]
    """Of each row of the fleet, whether other pods are there to prefill for it."""
    fabrics: Mapping[int, tuple[FabricClass, ...]]
    """Decode pod in a group → the classes of its pairs; empty if no pair is nearer than others."""
    places: tuple[Place, ...] | None
    """Of each row of the fleet; None: not known of any."""

    def has_prefill_pod(self, decode: int) -> bool:
        """Whether a pod may prefill for this one because of its role. Another unified pod alone is
        no disaggregated backend of a unified pod."""
        if decode not in self.grouped or decode not in self.unified:
            return decode in self.grouped
        groups = (group for group in self.groups if decode in group.decodes)
        return any(row not in self.unified for group in groups for row in group.prefills)

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
            self.unified & allowed,
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
            rows = (row_of[pod] for pod in _partners(fleet, model, decode) if pod in allowed)
            # In one order, so that pods with the same partners form one group.
            prefills = partners[key] = tuple(sorted(rows))
        members.setdefault(prefills, []).append(row_of[decode])
    places = tuple(pod.place for pod in fleet)
    known = places if any(place != Place() for place in places) else None
    groups = _groups(members.items(), known)
    return CandidateLayout(
        tuple(row_of[pod] for pod in ready),
        tuple(row_of[pod] for pod in decodes),
        groups,
        *_members(groups),
        frozenset(row_of[pod] for pod in ready if pod.backend.role is Role.UNIFIED),
        tuple(pod.estimates.is_decode for pod in fleet),
        _fabrics(groups),
        known,
    )


def _partners(fleet: Fleet, model: str | None, decode: Pod) -> list[Pod]:
    """The pods that may prefill for `decode`. A unified pod among alike ones is among its partners,
    so that they form one group, within which no pod prefills for itself."""
    candidates = fleet.prefill_candidates(model, decode)
    partners = [pod for pod in candidates if can_hand_off(pod, decode)]
    if decode.backend.role is not Role.UNIFIED or not fleet.is_disaggregated(decode):
        return partners
    alike = [pod for pod in fleet.ready_pods(model) if are_alike_unified(pod, decode)]
    return [*partners, *(pod for pod in alike if pod not in decode.unwarmed_prefills)]


def partner_fabrics(fleet: Fleet, decode: Pod) -> frozenset[FabricClass]:
    """The classes of the pairs of `decode` with all pods, ready or not, that may prefill for it."""
    return frozenset(
        fabric_class(pod.place, decode.place) for pod in fleet if can_prefill_for(pod, decode)
    )


class RecentlyUsed(Generic[K, V]):
    """The values of the MAX_NARROWED keys that were used last: a gateway repeats its subset
    hints."""

    def __init__(self) -> None:
        self._values: dict[K, V] = {}
        """The one used last comes last."""

    def get(self, key: K, make: Callable[[], V]) -> V:
        """The value of `key`, which `make` returns if there is none yet."""
        value = self._values.pop(key) if key in self._values else make()
        self._values[key] = value
        if len(self._values) > MAX_NARROWED:
            del self._values[next(iter(self._values))]
        return value

    def clear(self) -> None:
        """The pods changed."""
        self._values.clear()


def _groups(
    pairs: Iterable[tuple[Sequence[int], Sequence[int]]], places: Sequence[Place] | None
) -> tuple[Group, ...]:
    groups = []
    for prefills, decodes in pairs:
        # A pod that would only prefill for itself has no partner.
        own = prefills[0] if len(prefills) == 1 else None
        with_partner = tuple(row for row in decodes if row != own)
        if prefills and with_partner:
            groups.append(make_group(tuple(prefills), with_partner, places))
    return tuple(groups)


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
