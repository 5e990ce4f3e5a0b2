"""What filters and scorers see of a request and of its pods, from header to header."""

import json
from base64 import b64encode

from tandem_contract import headers as wire
from tandem_epp.exchange import HttpRequest, ResponseHeaders
from tandem_epp.placement.placement import Placement

from .test_picker import LONG, NOW, PickerSetup

SESSIONS = """
plugins:
- {type: session-affinity-scorer}
- type: session-affinity-scorer
  name: of-prefill
  parameters: {profileName: prefill, encodedEndpointHeaderConfig: {header: x-prefill-token}}
- {type: always-disagg-pd-decider}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: session-affinity-scorer}]}
- {name: prefill, plugins: [{pluginRef: of-prefill}]}
"""


def place(setup: PickerSetup, headers: dict[str, str]) -> Placement:
    body = json.dumps({"model": "m", "prompt": LONG}).encode()
    request = HttpRequest("POST", "/v1/completions", {wire.REQUEST_ID: "r", **headers})
    return setup.picker.place(request, body, NOW)


def test_a_client_that_sends_its_tokens_back_stays_on_its_pods() -> None:
    pods = {f"d{i}": "decode" for i in range(5)} | {f"p{i}": "prefill" for i in range(5)}
    setup = PickerSetup(SESSIONS, **pods)
    first = place(setup, {})
    first.on_response_headers(ResponseHeaders(None, 200), NOW)
    tokens = dict(first.response_headers)
    assert tokens.keys() == {"x-session-token", "x-prefill-token"}
    for _ in range(5):
        again = place(setup, tokens)
        assert (again.decode, again.prefill[0]) == (first.decode, first.prefill[0])
        assert dict(again.response_headers) == tokens


def test_the_token_names_the_pod_that_envoy_used() -> None:
    setup = PickerSetup(SESSIONS, d1="decode", d2="decode")
    placement = place(setup, {})
    other = next(pod for pod in setup.fleet if pod is not placement.decode)
    response = ResponseHeaders(None, 200, path="unified", served=other.address)
    placement.on_response_headers(response, NOW)
    token = b64encode(other.name.encode()).decode()
    assert placement.response_headers == (("x-session-token", token),)


def test_without_sessions_a_response_stays_as_it_is() -> None:
    assert place(PickerSetup(d="decode"), {}).response_headers == ()


def test_uncached_tokens_count_where_they_are_computed_until_the_answer() -> None:
    setup = PickerSetup("plugins: [{type: always-disagg-pd-decider}]", d="decode", p="prefill")
    split = place(setup, {})
    tokens = split.pods.size.prompt
    assert tokens > 100
    assert (setup["d"].tokens_in_flight, setup["p"].tokens_in_flight) == (0, tokens)
    split.on_response_headers(ResponseHeaders(None, 200), NOW)
    assert setup["p"].tokens_in_flight == 0
    split.end(NOW)
    setup.down("p")
    alone = place(setup, {})
    assert setup["d"].tokens_in_flight == alone.pods.size.prompt - alone.pods.size.cached
    alone.end(NOW)
    assert (setup["d"].tokens_in_flight, setup["p"].tokens_in_flight) == (0, 0)


def test_filters_that_leave_no_prefill_pod_let_one_engine_serve() -> None:
    text = """
plugins:
- {type: by-label, parameters: {label: tier, validValues: [none]}}
- {type: always-disagg-pd-decider}
schedulingProfiles:
- {name: decode, plugins: []}
- {name: prefill, plugins: [{pluginRef: by-label}]}
"""
    setup = PickerSetup(text, d="decode", p="prefill")
    placement = place(setup, {})
    assert (placement.decision.path, placement.decision.reason) == (
        "fallback",
        "no_prefill_backend",
    )
    assert not placement.prefill
    strict = PickerSetup(text, d="decode", p="prefill", strict="")
    status, error = strict.refusal(json.dumps({"model": "m", "prompt": LONG}).encode())
    assert (status, error["retry-after"]) == (503, "1")
