"""Requests about a stored response go to the backend that stores it, by any replica."""

import json

import pytest

from tandem_contract import headers as wire
from tandem_contract.config import Backend
from tandem_contract.paths import RoutingPath
from tandem_contract.plan_verification import verify
from tandem_contract.response_ids import new_response_id
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.exchange import HttpRequest
from tandem_epp.placement.placement import Placement

from .test_picker import KEYS, NOW, WEIGHTED, PickerSetup

NAMES = [f"d{number}" for number in range(8)]


def follow_up(setup: PickerSetup, response_id: object, subset: str = "") -> Placement:
    body = {"model": "m", "input": "word " * 4000, "previous_response_id": response_id}
    allowed = frozenset((subset,)) if subset else None
    request = HttpRequest("POST", "/v1/responses", {wire.REQUEST_ID: "r"}, subset=allowed)
    return setup.picker.place(request, json.dumps(body).encode(), NOW)


def about(setup: PickerSetup, method: str, path: str) -> Placement:
    return setup.picker.place(HttpRequest(method, path, {wire.REQUEST_ID: "r"}), None, NOW)


def new_setup(scheduling: str = "{}") -> PickerSetup:
    return PickerSetup(scheduling, **dict.fromkeys(NAMES, "decode"), p="prefill", strict="")


@pytest.mark.parametrize("scheduling", ["{}", WEIGHTED])
def test_every_replica_finds_the_backend_by_the_id_alone(scheduling: str) -> None:
    for name in NAMES:
        response_id = new_response_id(name)
        for setup in (new_setup(scheduling), new_setup(scheduling)):
            placed = follow_up(setup, response_id)
            assert placed.decode.name == name
            plan = verify(dict(placed.mutation.set)[wire.PLAN], KEYS, request_id="r", now=NOW)
            assert (plan.path, plan.reason) == (RoutingPath.UNIFIED, "previous_response")
            for method, rest in (("GET", "?stream=true"), ("DELETE", ""), ("POST", "/cancel")):
                path = f"/v1/responses/{response_id}{rest}"
                assert about(setup, method, path).decode.name == name


@pytest.mark.parametrize("response_id", ["resp_" + "0" * 32, "", None, 7, ["x"]])
def test_an_id_of_another_origin_may_be_any_backends(response_id: object) -> None:
    setup = new_setup()
    assert len({follow_up(setup, response_id).decode.name for _ in range(16)}) > 1


def test_a_backend_that_is_not_ready_or_not_allowed_is_not_chosen() -> None:
    setup, response_id = new_setup(), new_response_id("d3")
    assert follow_up(setup, response_id, "10.0.0.2:8000").decode.name == "d1"
    setup.down("d3")
    assert follow_up(setup, response_id).decode.name != "d3"


@pytest.mark.parametrize("name", ["d0", "d0_dp1"])
def test_all_ranks_of_an_engine_share_its_store(name: str) -> None:
    """A plan names the rank; a sidecar without plans knows the pod's name only."""
    setup = PickerSetup(d0="decode", d1="decode")
    for members in setup.fleet.backends:
        setup.fleet.set_ranks(members, 2)
    response_id = new_response_id(name)
    assert {follow_up(setup, response_id).decode.backend.name for _ in range(8)} == {"d0"}


def test_with_several_models_a_stored_response_is_found_without_a_model() -> None:
    setup = PickerSetup()
    setup.fleet.apply(
        DiscoveredBackend(Backend(name=name, url=f"http://10.0.0.{i}:8000", models=(name,)))
        for i, name in enumerate("ab")
    )
    for name in "ab":
        path = f"/v1/responses/{new_response_id(name)}"
        assert {about(setup, "GET", path).decode.name for _ in range(8)} == {name}
