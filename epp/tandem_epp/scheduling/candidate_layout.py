"""The pods that may serve a model, and which can exchange KV, as rows of the fleet's figures.

A layout is computed once per change of the pods, and narrowed for a request that may go to some of
them only, as with a gateway's subset hint.
"""

from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from tandem_contract.paths import Role
from tandem_planner.choice import Group

from ..backends.fleet import Fleet
from ..backends.pairing import can_hand_off, pairing_key
from ..backends.pods import Pod


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

    def within(self, allowed: AbstractSet[int]) -> "CandidateLayout":
        """The same for those of the pods that are `allowed`."""
        groups = _groups(
            (
                [row for row in group.prefills if row in allowed],
                [row for row in group.decodes if row in allowed],
            )
            for group in self.groups
        )
        return CandidateLayout(
            tuple(row for row in self.rows if row in allowed),
            tuple(row for row in self.decodes if row in allowed),
            groups,
            *_members(groups),
            self.is_decode,
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
    groups = _groups(members.items())
    return CandidateLayout(
        tuple(row_of[pod] for pod in ready),
        tuple(row_of[pod] for pod in decodes),
        groups,
        *_members(groups),
        tuple(pod.estimates.is_decode for pod in fleet),
    )


def _groups(pairs: Iterable[tuple[Sequence[int], Sequence[int]]]) -> tuple[Group, ...]:
    return tuple(
        Group(tuple(prefills), tuple(decodes))
        for prefills, decodes in pairs
        if prefills and decodes
    )


def _members(groups: tuple[Group, ...]) -> tuple[tuple[int, ...], frozenset[int]]:
    """All pods of `groups` that prefill, and all that decode."""
    return (
        tuple(sorted({row for group in groups for row in group.prefills})),
        frozenset(row for group in groups for row in group.decodes),
    )
