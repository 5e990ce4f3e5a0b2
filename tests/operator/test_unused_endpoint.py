"""What stays of an endpoint that no pool names any more, and until when."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from tandem_contract import labels
from tandem_operator.observed import Body
from tandem_operator.planning.api_objects import rfc3339
from tandem_operator.resources.pools import DecodePool
from tandem_operator.routing.endpoint.observed import (
    EndpointPlan,
    ObjectRef,
    ObservedEndpoint,
    UnreadablePool,
)
from tandem_operator.routing.endpoint.plan import plan_endpoint
from tandem_operator.routing.endpoint.settings import RouterSettings
from tandem_operator.routing.endpoint.unused import GRACE

from .endpoints import NOW, by_name, decode, endpoint

SETTINGS = RouterSettings(tandem_image="tandem:test")
KEYS, EPP, CLIENTS = (
    ObjectRef("v1", "Secret", "chat-plan-keys"),
    ObjectRef("v1", "Service", "chat-epp"),
    ObjectRef("v1", "Service", "chat"),
)


def left(pool: DecodePool | None = None, **fields: Any) -> ObservedEndpoint:
    """What is observed after the deletion of an endpoint's only pool."""
    children: Mapping[ObjectRef, Body] = by_name(
        plan_endpoint(endpoint(pool or decode()), SETTINGS).apply
    )
    return replace(endpoint(), pools=(), children=children, **fields)


def noted(observed: ObservedEndpoint, ref: ObjectRef, text: str) -> ObservedEndpoint:
    service = observed.children[ref]
    annotations = {**service["metadata"].get("annotations", {}), labels.UNUSED_SINCE: text}
    changed = {**service, "metadata": {**service["metadata"], "annotations": annotations}}
    return replace(observed, children={**observed.children, ref: changed})


def test_services_and_keys_stay_and_the_time_is_written_down() -> None:
    observed = left()
    plan = plan_endpoint(observed, SETTINGS)
    assert (plan.apply, plan.notes) == ((), {"chat": rfc3339(NOW)})
    assert set(observed.children) - set(plan.delete) == {KEYS, EPP, CLIENTS}
    assert plan.requeue_after == GRACE


def test_nothing_more_is_written_until_the_time_is_over() -> None:
    observed = noted(left(now=NOW + GRACE - 1), CLIENTS, rfc3339(NOW))
    observed = replace(observed, children={r: observed.children[r] for r in (KEYS, EPP, CLIENTS)})
    assert plan_endpoint(observed, SETTINGS) == EndpointPlan(requeue_after=1.0)


def test_then_the_keys_go_and_the_service_with_the_time_is_last() -> None:
    observed = noted(left(now=NOW + GRACE), CLIENTS, rfc3339(NOW))
    plan = plan_endpoint(observed, SETTINGS)
    assert set(plan.delete) == set(observed.children)
    assert plan.delete[-3:] == (KEYS, EPP, CLIENTS)
    assert (plan.notes, plan.requeue_after) == ({}, None)


@pytest.mark.parametrize(
    ("routing", "kept"),
    [
        ({"envoy": {"enabled": False}}, {KEYS, EPP}),
        ({"epp": {"enabled": False}}, {CLIENTS}),
    ],
)
def test_the_time_is_on_a_service_that_the_endpoint_has(
    routing: dict[str, Any], kept: set[ObjectRef]
) -> None:
    observed = left(decode(routing=routing))
    plan = plan_endpoint(observed, SETTINGS)
    assert set(observed.children) - set(plan.delete) == kept
    assert [ObjectRef("v1", "Service", name) in kept for name in plan.notes] == [True]


def test_keys_without_a_service_go_at_once() -> None:
    observed = left()
    observed = replace(observed, children={KEYS: observed.children[KEYS]})
    assert plan_endpoint(observed, SETTINGS) == EndpointPlan(delete=(KEYS,))


@pytest.mark.parametrize("text", ["yesterday", ""])
def test_a_time_that_cannot_be_read_is_replaced(text: str) -> None:
    plan = plan_endpoint(noted(left(), CLIENTS, text), SETTINGS)
    assert plan.notes == {"chat": rfc3339(NOW)}


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_pool_ends_it(is_readable: bool) -> None:
    old = noted(left(now=NOW + 2 * GRACE), CLIENTS, rfc3339(NOW))
    pool = endpoint(decode("other")).pools
    back = (
        replace(old, pools=pool, secret=b"")
        if is_readable
        else replace(old, unreadable_pools=(UnreadablePool("uid-x", "x"),))
    )
    plan = plan_endpoint(back, SETTINGS)
    assert (plan.notes, plan.delete) == ({"chat": None}, ())
    assert {KEYS, EPP, CLIENTS}.isdisjoint(map(ObjectRef.of, plan.apply))


def test_what_others_have_labelled_stays() -> None:
    observed = left(now=NOW + GRACE)
    metadata = {"name": "mine", "labels": {labels.ENDPOINT: "chat"}}
    mine = {"apiVersion": "v1", "kind": "Service", "metadata": metadata}
    observed = replace(observed, children={**observed.children, ObjectRef.of(mine): mine})
    plan = plan_endpoint(observed, SETTINGS)
    assert ObjectRef.of(mine) not in plan.delete
    alone = replace(observed, children={ObjectRef.of(mine): mine})
    assert plan_endpoint(alone, SETTINGS) == EndpointPlan()


def taken_over(observed: ObservedEndpoint, *services: ObjectRef) -> ObservedEndpoint:
    """With Services to which someone else has applied a selector of their own."""
    changed = {
        ref: {**observed.children[ref], "spec": {"selector": {"app": "theirs"}}} for ref in services
    }
    return replace(observed, children={**observed.children, **changed})


def test_a_service_that_someone_has_taken_over_stays_without_a_note() -> None:
    alone = replace(left(), children={CLIENTS: left().children[CLIENTS]})
    old = taken_over(noted(alone, CLIENTS, rfc3339(NOW - GRACE)), CLIENTS)
    assert plan_endpoint(old, SETTINGS) == EndpointPlan()
    back = replace(old, pools=endpoint().pools)
    assert plan_endpoint(back, SETTINGS).notes == {}
    without_epp = endpoint(decode(routing={"epp": {"enabled": False}}))
    theirs = taken_over(noted(left(), EPP, rfc3339(NOW)), EPP)
    plan = plan_endpoint(replace(theirs, pools=without_epp.pools), SETTINGS)
    assert (EPP in plan.delete, plan.notes) == (False, {})


def test_the_time_then_is_on_the_other_service() -> None:
    observed = taken_over(noted(left(), CLIENTS, rfc3339(NOW - GRACE)), CLIENTS)
    plan = plan_endpoint(observed, SETTINGS)
    assert plan.notes == {"chat-epp": rfc3339(NOW)}
    assert {KEYS, EPP, CLIENTS}.isdisjoint(plan.delete)


@pytest.mark.parametrize("ahead", [301.0, 200e9])
def test_a_time_that_is_to_come_is_replaced(ahead: float) -> None:
    plan = plan_endpoint(noted(left(), CLIENTS, rfc3339(NOW + ahead)), SETTINGS)
    assert plan.notes == {"chat": rfc3339(NOW)}
    soon = plan_endpoint(noted(left(), CLIENTS, rfc3339(NOW + 300)), SETTINGS)
    assert soon.notes == {}


def test_only_the_services_that_stay_have_a_time() -> None:
    observed = left()
    metadata = {
        "name": "mine",
        "labels": {labels.ENDPOINT: "chat"},
        "annotations": {labels.UNUSED_SINCE: rfc3339(NOW - GRACE)},
    }
    mine = {"apiVersion": "v1", "kind": "Service", "metadata": metadata}
    beside = replace(observed, children={**observed.children, ObjectRef.of(mine): mine})
    assert plan_endpoint(beside, SETTINGS).notes == {"chat": rfc3339(NOW)}
    used = plan_endpoint(replace(beside, pools=endpoint().pools), SETTINGS)
    assert (used.notes, used.delete) == ({}, ())
