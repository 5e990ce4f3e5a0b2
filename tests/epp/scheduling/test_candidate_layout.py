"""Which pods a request may go to, and what an adapter adds to their costs."""

from dataclasses import fields

from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.backends.fleet import Fleet
from tandem_epp.scheduling.candidate_layout import CandidateLayout, make_layout
from tests.epp.test_picker import PickerSetup, backend

PODS = st.lists(
    st.tuples(
        st.sampled_from(["prefill", "decode", "unified"]), st.sampled_from("12"), st.booleans()
    ),
    min_size=1,
    max_size=8,
)
"""Role, compat hash, and whether the gateway allows the pod."""


def fleet_of(pods: list[tuple[str, str, bool]]) -> Fleet:
    setup = PickerSetup()
    setup.fleet.apply([backend(f"pod-{i}", role, hash_) for i, (role, hash_, _) in enumerate(pods)])
    return setup.fleet


def comparable(layout: CandidateLayout) -> dict[str, object]:
    values = {field.name: getattr(layout, field.name) for field in fields(layout)}
    values["groups"] = {(group.prefills, group.decodes) for group in layout.groups}
    return values


@given(pods=PODS)
def test_a_layout_within_a_subset_is_that_of_the_subset(pods: list[tuple[str, str, bool]]) -> None:
    fleet = fleet_of(pods)
    ready = tuple(fleet)
    some = tuple(pod for pod, (_, _, allowed) in zip(fleet, pods, strict=True) if allowed)
    within = make_layout(fleet, ready, None).within(
        frozenset(fleet.figures.rows[pod] for pod in some)
    )
    assert comparable(within) == comparable(make_layout(fleet, some, None))
