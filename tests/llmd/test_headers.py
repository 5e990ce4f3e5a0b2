"""The headers between an EPP and a sidecar, where one of them is llm-d's (llm-d-router 0.10).

llm-d's EPP writes `net.JoinHostPort(ip, port)`, and for several pods commas between them. Its
sidecar splits a single header at commas, strips spaces and takes the first, or a random one; it
passes headers that it does not know on to the engine.
"""

import ipaddress
import json

import pytest

from tandem_contract import headers as wire
from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_epp.exchange import HttpRequest
from tandem_epp.placement.placement import Placement
from tandem_http1.messages import Request
from tandem_sidecar.security.route import Route, UsedPlans, parse_allow, route

from ..epp.placement.test_picker import LONG, NOW, PickerSetup
from ..sidecar.conftest import Harness
from ..sidecar.wire import wire as connect

ALLOW = parse_allow(("10.0.0.0/8", "fd00::/8"))


def prefiller_of_llmd(value: str) -> tuple[str, int]:
    """The pod that llm-d's sidecar sends the prefill to."""
    first = value.partition(",")[0].strip()
    host, _, port = first.rpartition(":")
    ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    return host, int(port)


@pytest.mark.parametrize("has_keys", [True, False])
def test_llm_d_s_sidecar_can_read_what_tandem_s_epp_sets(has_keys: bool) -> None:
    setup = PickerSetup(d="decode", p="prefill", q="prefill")
    if not has_keys:
        setup.picker.plan_keys = {}
    body = json.dumps({"model": "m", "prompt": LONG}).encode()
    # A client's copies must not reach the sidecar, since llm-d's trusts the header.
    forged = {wire.REQUEST_ID: "r", wire.PREFILLER_HOST_PORT: "10.9.9.9:1", wire.PLAN: "x"}
    placement = setup.picker.place(HttpRequest("POST", "/v1/completions", forged), body, NOW)
    set_headers = dict(placement.mutation.set)
    named = prefiller_of_llmd(set_headers[wire.PREFILLER_HOST_PORT])
    assert f"{named[0]}:{named[1]}" == placement.prefill[0].address
    assert len(set_headers[wire.PREFILLER_HOST_PORT].split(",")) == len(placement.prefill) == 2
    assert set_headers[wire.DESTINATION_ENDPOINT] == setup["d"].address
    assert (wire.PLAN in set_headers) is has_keys
    if not has_keys:
        assert wire.PLAN in placement.mutation.remove


def test_a_request_that_is_not_split_names_no_prefill_pod() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    placement: Placement = setup.place("short")[0]
    assert wire.PREFILLER_HOST_PORT not in dict(placement.mutation.set)
    # llm-d's sidecar serves it with its own engine, unless a client's copy is left.
    assert wire.PREFILLER_HOST_PORT in placement.mutation.remove


def route_of(*headers: tuple[str, str], keys: dict[str, bytes] | None = None) -> Route:
    pairs = [(name.encode(), value.encode()) for name, value in headers]
    request = Request(
        method=b"POST",
        target=b"/v1/completions",
        headers=pairs,
        values=dict(pairs),
        body=b"{}",
        http10=False,
        keep_alive=True,
    )
    return route(request, "r", keys or {}, ALLOW, NOW, is_own=lambda _: True, used=UsedPlans())


@pytest.mark.parametrize(
    ("value", "addresses"),
    [
        ("10.0.0.5:8000", [HostPort("10.0.0.5", 8000)]),
        ("10.0.0.5:8000,10.0.0.6:8001", [HostPort("10.0.0.5", 8000), HostPort("10.0.0.6", 8001)]),
        (" 10.0.0.5:1 , 10.0.0.6:2 ", [HostPort("10.0.0.5", 1), HostPort("10.0.0.6", 2)]),
        ("[fd00::5]:8000", [HostPort("fd00::5", 8000)]),
        ("192.0.2.1:8000,10.0.0.6:8000", [HostPort("10.0.0.6", 8000)]),
    ],
)  # fmt: skip
def test_tandem_s_sidecar_reads_what_llm_d_s_epp_sets(
    value: str, addresses: list[HostPort]
) -> None:
    chosen = route_of((wire.PREFILLER_HOST_PORT, value))
    assert chosen.path is RoutingPath.PREFILL_THEN_DECODE
    assert [candidate.address for candidate in chosen.candidates] == addresses


@pytest.mark.parametrize("value", ["192.0.2.1:8000", "prefill.example:8000", "10.0.0.5"])
def test_pods_outside_the_allow_list_are_not_asked(value: str) -> None:
    chosen = route_of((wire.PREFILLER_HOST_PORT, value))
    assert (chosen.path, chosen.candidates) == (RoutingPath.UNIFIED, ())
    assert chosen.error is not None


def test_with_plan_keys_a_header_without_a_plan_is_not_trusted() -> None:
    chosen = route_of((wire.PREFILLER_HOST_PORT, "10.0.0.5:8000"), keys={"k": b"k" * 32})
    assert (chosen.path, chosen.candidates) == (RoutingPath.UNIFIED, ())


async def test_no_header_of_llm_d_s_epp_reaches_an_engine(harness: Harness) -> None:
    """Encoders, sources of KV and ranks are named to a sidecar, and an engine ignores them."""
    prefill = await harness.prefill()
    await harness.start()
    names = (wire.ENCODER_HOSTS_PORTS, wire.KV_CACHE_SOURCE, wire.DATA_PARALLEL_HOST_PORT)
    lines = [f"{name}: 10.0.0.7:8000" for name in names]
    async with connect(harness.sidecar.listen) as client:
        prefiller = f"{wire.PREFILLER_HOST_PORT}: {prefill.address}"
        client.post(b'{"model": "m", "prompt": "p", "max_tokens": 2}', prefiller, *lines)
        answer = await client.response()
    assert answer.headers[wire.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
    for request in (*prefill.requests, *harness.decode.requests):
        assert not {*names, wire.PREFILLER_HOST_PORT} & request.headers.keys()
