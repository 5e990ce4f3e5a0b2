"""From a request to headers: every path, every error response, and exact counts in flight."""

import json
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract import headers as wire
from tandem_contract.config import Backend, DisaggregatedServing, FlowControl
from tandem_contract.documents import parse_documents
from tandem_contract.paths import Role, RoutingPath
from tandem_contract.plan import Plan, ResumeLimits, Timeouts, key_id
from tandem_contract.plan_verification import verify
from tandem_contract.request_ids import usable_request_id
from tandem_contract.request_kinds import PATHS
from tandem_contract.timing import Timing
from tandem_epp.backends.adapters import AdapterSlots
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.choice.routing import Routing
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.exchange import HttpRequest, NotPlaced, ResponseHeaders
from tandem_epp.flow.control import FlowController
from tandem_epp.flow.metrics import FlowMetrics
from tandem_epp.flow.settings import flow_settings
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.metrics.counters import Metrics
from tandem_epp.placement.history import History
from tandem_epp.placement.picker import EndpointPicker
from tandem_epp.placement.placement import Placement
from tandem_epp.placement.refusals import Refusals
from tandem_epp.process.configuration import load_text
from tandem_planner.prefill_fit import PREFILL_PRIOR, PrefillCost

KEYS = {"k": b"0123456789abcdef"}
LONG = "word " * 400
WEIGHTED = """
plugins: [{type: prefix-cache-scorer}, {type: active-request-scorer}, {type: queue-scorer}]
schedulingProfiles:
- name: default
  plugins:
  - {pluginRef: prefix-cache-scorer, weight: 3}
  - {pluginRef: active-request-scorer, weight: 2}
  - {pluginRef: queue-scorer}
"""
"""Scorers choose instead of the cost."""
CHOICES = ("{}", "plugins: [{type: queue-scorer}]")
"""By cost, and by llm-d's scores."""
NOW = 1000.0
ROLES = ("decode", "prefill")


class PickerSetup:
    """A picker with backends `name=role`, each at 10.0.0.N:8000."""

    def __init__(self, scheduling: str = "{}", *, enabled: bool = True, **roles: str) -> None:
        serving = DisaggregatedServing(enabled=enabled, fallback_to_unified="strict" not in roles)
        roles.pop("strict", None)
        document = parse_documents(scheduling, "router.yaml")[0]
        self.fleet = Fleet()
        self.fleet.apply(
            DiscoveredBackend(
                Backend(name=name, url=f"http://10.0.0.{i}:8000", role=Role(role), models=("m",))
            )
            for i, (name, role) in enumerate(roles.items(), 1)
        )
        self.metrics, self.history = Metrics(self.fleet), History(8)
        routing = Routing(serving, load_scheduling(document, document.data, serving))
        self.picker = EndpointPicker(self.fleet, routing, self.metrics, self.history, Random(3))
        self.picker.plan_keys = KEYS

    def __getitem__(self, name: str) -> Pod:
        return next(pod for pod in self.fleet if pod.name == name)

    def flow_control(self, settings: FlowControl | None = None) -> FlowController:
        """Flow control in front of the picker; None: it is off. The header `priority` counts."""
        flow = FlowController(
            self.fleet,
            FlowMetrics(self.metrics.registry),
            self.metrics.faults,
            refuse=Refusals(self.metrics).error,
            outlook=self.picker.outlook,
            priority=lambda request: int(request.headers.get("priority", "0")),
            tenant=lambda request: self.picker.objectives.tenant(request.headers),
            random=Random(1),
        )
        flow.settings = settings and flow_settings(settings)
        return flow

    def down(self, name: str) -> None:
        self[name].record_failed_check()
        self.fleet.invalidate_views()

    def place(self, prompt: object = LONG, **fields: object) -> tuple[Placement, Plan]:
        body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
        request = HttpRequest("POST", "/v1/completions?x=1", {wire.REQUEST_ID: "r"})
        placement = self.picker.place(request, body, NOW)
        header = dict(placement.mutation.set)[wire.PLAN]
        return placement, verify(header, KEYS, request_id="r", now=NOW)

    def place_alone(self, prompt: object) -> Plan:
        """Place a request that ends before the next one."""
        placement, plan = self.place(prompt)
        placement.end(NOW)
        return plan

    def refusal(self, body: bytes, **request: str) -> tuple[int, dict[str, object]]:
        http = HttpRequest("POST", "/v1/completions", request)
        with pytest.raises(NotPlaced) as refusal:
            self.picker.place(http, body, NOW)
        response = refusal.value.reply
        error = json.loads(response.body)["error"]
        assert error["code"] == response.status
        return response.status, {**error, **dict(response.headers)}

    def decisions(self, path: str, reason: str) -> float | None:
        labels = {"path": path, "reason": reason}
        return self.metrics.registry.get_sample_value("tandem_epp_decisions_total", labels)


def test_the_next_key_signs_from_its_time_on_without_a_reload() -> None:
    setup = PickerSetup(d="decode")
    keys = {key_id(at): b"0123456789abcdef" for at in (NOW - 60, NOW + 60)}
    setup.picker.plan_keys = keys
    signed_by = []
    for now in (NOW, NOW + 59, NOW + 60):
        request = HttpRequest("POST", "/v1/completions", {wire.REQUEST_ID: "r"})
        placement = setup.picker.place(request, b'{"model": "m", "prompt": "x"}', now)
        header = dict(placement.mutation.set)[wire.PLAN]
        verify(header, keys, request_id="r", now=now)
        signed_by.append(header.split(".")[1])
    assert signed_by == [key_id(NOW - 60), key_id(NOW - 60), key_id(NOW + 60)]


def test_requests_for_an_adapter_stay_where_it_is_loaded_and_avoid_full_pods() -> None:
    setup = PickerSetup("plugins: [{type: lora-affinity-scorer}]", full="unified", has="unified")
    setup.fleet.apply(
        DiscoveredBackend(msgspec.structs.replace(pod.backend, models=("m", "x", "y")))
        for pod in list(setup.fleet)
    )
    for name, running, waiting in (("full", "ab", "y"), ("has", "x", "")):
        reported = AdapterSlots(frozenset(running), frozenset(waiting), slots=2)
        setup[name].apply_scrape(ScrapeResult(Gauges(), b"", adapters=reported))
        setup.fleet.learn_adapters(reported)
    for adapter in ("x", "y"):
        body = json.dumps({"model": adapter, "prompt": LONG}).encode()
        request = HttpRequest("POST", "/v1/completions", {wire.REQUEST_ID: "r"})
        assert setup.picker.place(request, body, NOW).decode.name == "has"
    assert setup["has"].adapters.load_seconds("y") == 0, "it will be loaded by then"


def test_the_plan_names_the_rank_of_each_leg() -> None:
    setup = PickerSetup(WEIGHTED, d="decode", p="prefill")
    for members, ranks in zip(list(setup.fleet.backends), (2, 3), strict=True):
        setup.fleet.set_ranks(members, ranks)
    for name in ("d_dp0", "p_dp0", "p_dp2"):
        setup[name].in_flight = 5
    placement, plan = setup.place()
    assert (plan.decode.name, plan.decode.rank) == ("d_dp1", 1)
    assert (plan.prefill[0].name, plan.prefill[0].rank) == ("p_dp1", 1)
    headers = dict(placement.mutation.set)
    assert headers[wire.DATA_PARALLEL_RANK] == "1", "for an engine without a sidecar"
    assert headers[wire.PREFILLER_HOST_PORT] == "10.0.0.2:8000", "each address once"
    assert setup["d_dp1"].in_flight == setup["p_dp1"].in_flight == 1


def test_a_split_names_both_pods_and_removes_other_internal_headers() -> None:
    setup = PickerSetup(d="decode", p1="prefill", p2="prefill")
    setup["p1"].estimates.queue.add(0.02, NOW)
    placement, plan = setup.place()
    headers = dict(placement.mutation.set)
    assert headers[wire.DESTINATION_ENDPOINT] == placement.mutation.destination == "10.0.0.1:8000"
    assert headers[wire.PREFILLER_HOST_PORT] == "10.0.0.3:8000,10.0.0.2:8000"
    assert set(placement.mutation.remove) == wire.INTERNAL - headers.keys()
    assert wire.REQUEST_ID not in headers
    assert (plan.path, plan.reason) == (RoutingPath.PREFILL_THEN_DECODE, "worth_it")
    assert (plan.decode.name, [p.name for p in plan.prefill]) == ("d", ["p2", "p1"])
    assert plan.expires > NOW
    assert setup.decisions("prefill_then_decode", "worth_it") == 1


def test_an_answered_prompt_counts_as_cached_on_its_decode_pod() -> None:
    setup = PickerSetup(d1="decode", d2="decode", p="prefill")
    first, _ = setup.place()
    first.on_response_headers(ResponseHeaders(None, 200), NOW)
    _, repeated_plan = setup.place()
    assert repeated_plan.path is RoutingPath.FAST_DECODE
    assert repeated_plan.decode.name == first.decode.name
    assert repeated_plan.cached_tokens == 496
    setup.down(first.decode.name)
    other, plan = setup.place()
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE
    assert other.decode is not first.decode


def test_a_short_prompt_a_batch_and_a_disabled_split_are_unified() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    assert setup.place("hi")[1].reason == "cheaper_here"
    assert setup.place([LONG, LONG])[1].reason == "batch"
    assert setup.place(LONG, n=2)[1].reason == "n"
    off = PickerSetup(enabled=False, d="decode", p="prefill")
    assert off.place()[1].reason == "split_off"
    off = PickerSetup(WEIGHTED, enabled=False, d="decode", p="prefill")
    assert off.place()[1].reason == "split_off"
    assert PickerSetup(enabled=False, u="unified").place()[1].reason == "not_disaggregated"
    assert PickerSetup(u="unified", v="unified").place()[1].path is RoutingPath.UNIFIED


def test_a_small_model_is_split_before_a_transfer_is_measured() -> None:
    """The KV assumed of a large one would take longer than half of the small one's prefill."""
    setup = PickerSetup(d="decode", p="prefill")
    small = PrefillCost(0.004, 2.5e-5, 0.0)
    for length in (32, 40, 48):
        placement, plan = setup.place([length] * length)
        assert plan.path is RoutingPath.UNIFIED, "too short"
        timing = Timing(queue=0.0, compute=small.seconds(length), cached=0, computed=length)
        placement.on_response_headers(ResponseHeaders(timing.encode(), 200), NOW)
        placement.end(NOW)
    # As with each scrape: the prefill pod is assumed to be as fast.
    setup.fleet.figures.share()
    assert setup.place_alone([1] * 80).path is RoutingPath.UNIFIED, "cheaper alone"
    assert setup.place_alone([1] * 2400).path is RoutingPath.PREFILL_THEN_DECODE


def test_a_unified_backend_prefills_for_others_and_not_for_itself() -> None:
    setup = PickerSetup(WEIGHTED, d="decode", u="unified")
    setup["u"].in_flight = 9
    assert [p.name for p in setup.place()[1].prefill] == ["u"]
    alone = PickerSetup(WEIGHTED, p="prefill", u="unified")
    assert [p.name for p in alone.place()[1].prefill] == ["p"]
    alone.down("p")
    assert alone.place("new " * 400)[1].path is RoutingPath.FALLBACK


def test_the_plan_tells_that_a_unified_pod_asks_for_a_proof() -> None:
    setup = PickerSetup(WEIGHTED, d="decode", u="unified", p="prefill")
    setup["u"].in_flight = 9
    _, plan = setup.place(LONG)
    asks = {target.name: target.asks_for_proof for target in plan.prefill}
    assert asks == {"u": True, "p": False}
    assert not plan.decode.asks_for_proof


def test_no_prefill_backend_falls_back_or_is_refused() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    setup.down("p")
    assert setup.place()[1].path is RoutingPath.FALLBACK
    strict = PickerSetup(d="decode", p="prefill", strict="")
    strict.down("p")
    status, error = strict.refusal(json.dumps({"prompt": LONG}).encode())
    assert (status, error["retry-after"]) == (503, "1")


def test_without_a_decode_backend_a_prefill_backend_serves() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    setup.down("d")
    placement, plan = setup.place()
    assert (placement.decode.name, plan.path) == ("p", RoutingPath.FALLBACK)
    assert plan.reason == "no_decode_backend"
    setup.down("p")
    assert setup.refusal(b"{}")[0] == 503


@pytest.mark.parametrize(
    "member",
    [
        pytest.param(r'"kv_transfer_params": {"do_remote_prefill": true}', id="kv"),
        pytest.param(r'"\u006bv_transfer_params": {}', id="escaped"),
        pytest.param('"vllm_xargs": {"kv_transfer_params": {}}', id="nested"),
    ],
)
def test_no_prefill_pod_gets_fields_that_only_a_sidecar_removes(member: str) -> None:
    setup = PickerSetup(d="decode", p="prefill")
    body = b'{"model": "m", "prompt": "x", %s}' % member.encode()
    setup.down("d")
    assert setup.refusal(body)[0] == 503
    unread = HttpRequest("POST", "/v1/embeddings", {wire.REQUEST_ID: "r"})
    with pytest.raises(NotPlaced):
        setup.picker.place(unread, b"", NOW)
    assert setup.picker.place(HttpRequest("GET", "/health", {}), b"", NOW).decode is setup["p"]


def test_requests_with_a_common_prefix_spread_over_the_pods() -> None:
    setup = PickerSetup(**{f"u{i}": "unified" for i in range(10)})
    system = "be helpful " * 1500
    first, _ = setup.place(system)
    first.on_response_headers(ResponseHeaders(None, 200), NOW)
    first.end(NOW)
    chosen = [setup.place(f"{system} question {i} " + f"{i} " * 250)[0].decode for i in range(200)]
    assert max(map(chosen.count, setup.fleet)) <= 1.3 * 200 / 10


@pytest.mark.parametrize(("queued", "goes_to_cache"), [(0, True), (20, False)])
def test_a_long_prompt_goes_to_its_cache_unless_waiting_costs_more(
    queued: int, goes_to_cache: bool
) -> None:
    setup = PickerSetup(a="unified", b="unified", c="unified")
    cached = "word " * 48_000
    streaming, _ = setup.place(cached, stream=True)
    # It goes on streaming: a running decode.
    timing = Timing(compute=PREFILL_PRIOR.seconds(60_000), cached=0, computed=60_000).encode()
    streaming.on_response_headers(ResponseHeaders(timing, 200), NOW)
    for _ in range(queued):
        streaming.decode.estimates.queue.add(2.0, NOW)
    streaming.decode.estimates.changed()
    long, _ = setup.place(cached + "more " * 32_000)
    assert (long.decode is streaming.decode) == goes_to_cache


def test_in_flight_counts_follow_a_request_and_end_at_zero() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    placement, _ = setup.place()
    assert (setup["d"].in_flight, setup["p"].in_flight) == (1, 1)
    timing = Timing(compute=0.5, cached=10, computed=40).encode()
    placement.on_response_headers(ResponseHeaders(timing, 200, "p"), NOW)
    assert (setup["d"].in_flight, setup["p"].in_flight) == (1, 0)
    placement.on_response_headers(ResponseHeaders(None, 200), NOW)
    placement.end(NOW)
    assert (setup["d"].in_flight, setup["p"].in_flight) == (0, 0)
    assert (setup["p"].estimates.observed_at, setup["d"].estimates.observed_at) == (NOW, None)
    sample = setup.metrics.registry.get_sample_value
    assert sample("tandem_epp_prefix_hit_ratio_sum", {"source": "measured"}) == 0.2
    early, _ = setup.place()
    early.end(NOW)
    assert (setup["d"].in_flight, setup["p"].in_flight) == (0, 0)


def test_timing_is_credited_to_the_backend_that_computed() -> None:
    setup = PickerSetup(d="decode", p1="prefill", p2="prefill")
    timing = Timing(compute=1.0, computed=100).encode()
    placement, plan = setup.place()
    retried = plan.prefill[1].name
    placement.on_response_headers(ResponseHeaders(timing, 200, retried), NOW)
    assert [pod.name for pod in setup.fleet if pod.estimates.observed_at] == [retried]
    placement, _ = setup.place("other " * 400)
    placement.on_response_headers(ResponseHeaders(timing, 200, None), NOW)
    assert setup["d"].estimates.observed_at, "without a prefill backend the decode backend computed"


def test_errors_that_are_not_the_clients_fault_carry_llm_ds_reason() -> None:
    setup = PickerSetup(d="decode")
    reason = wire.REQUEST_DROPPED_REASON
    assert dict(setup.picker.memory_full(None).reply.headers)[reason] == "rejected-saturated"
    _, bad = setup.refusal(b"{")
    assert reason not in bad
    subset = HttpRequest("POST", "/v1/completions", {}, frozenset({"10.9.9.9:8000"}))
    with pytest.raises(NotPlaced) as refusal:
        setup.picker.place(subset, b'{"model": "m", "prompt": "x"}', NOW)
    assert dict(refusal.value.reply.headers)[reason] == "rejected-no-endpoints"
    setup.down("d")
    status, gone = setup.refusal(b'{"model": "m", "prompt": "x"}')
    assert (status, gone[reason], gone["retry-after"]) == (503, "rejected-no-endpoints", "1")


def test_error_responses() -> None:
    setup = PickerSetup(d="decode")
    status, error = setup.refusal(b'{"model": "other"}')
    assert (status, error["param"]) == (404, "model")
    assert error["message"] == "The model `other` does not exist. This endpoint serves `m`."
    assert setup.refusal(b"{")[0] == 400
    assert json.loads(setup.picker.body_too_large(None, 5).reply.body)["error"]["code"] == 413
    assert json.loads(setup.picker.body_too_slow(None).reply.body)["error"]["code"] == 408
    assert setup.decisions("refused", "unknown_model") == 1


def test_error_responses_of_messages_have_anthropics_form() -> None:
    setup = PickerSetup(d="decode")
    request = HttpRequest("POST", "/v1/messages", {})
    with pytest.raises(NotPlaced) as refusal:
        setup.picker.place(request, b'{"model": "other"}', NOW)
    replies = [refusal.value, setup.picker.body_too_large(request, 5)]
    errors = [json.loads(reply.reply.body) for reply in replies]
    assert [error["type"] for error in errors] == ["error", "error"]
    kinds = [error["error"]["type"] for error in errors]
    assert kinds == ["not_found_error", "request_too_large"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/audio/transcriptions", "/tokenize"])
def test_a_coded_body_is_refused_before_it_is_read(path: str) -> None:
    setup = PickerSetup(d="decode", p="prefill")
    coded = HttpRequest("POST", path, {"content-encoding": "identity, gzip"})
    assert not setup.picker.needs_body(coded)
    with pytest.raises(NotPlaced) as reply:
        setup.picker.place(coded, None, NOW)
    assert reply.value.reply.status == 415
    assert ("accept-encoding", "identity") in reply.value.reply.headers
    plain = HttpRequest("POST", path, {"content-encoding": "identity"})
    assert setup.picker.place(plain, b'{"prompt": "a"}', NOW).decode.name == "d"


@pytest.mark.parametrize(
    "request_head",
    [
        HttpRequest("GET", "/v1/models", {}),
        HttpRequest("POST", "/v1/messages/count_tokens", {}),
        HttpRequest("POST", "/v1/chat/completions/batch", {"content-type": "text/plain"}),
    ],
)
def test_a_request_that_is_not_read_passes_through_with_an_id(request_head: HttpRequest) -> None:
    setup = PickerSetup(d="decode", p="prefill")
    assert not setup.picker.needs_body(request_head)
    placement = setup.picker.place(request_head, b"", NOW)
    headers = dict(placement.mutation.set)
    assert headers[wire.DESTINATION_ENDPOINT] == "10.0.0.1:8000"
    plan = verify(headers[wire.PLAN], KEYS, request_id=headers[wire.REQUEST_ID], now=NOW)
    assert (plan.path, plan.reason) == (RoutingPath.UNIFIED, "passthrough")


@pytest.mark.parametrize(
    "sent_id",
    [None, "", "two words", "caf\xe9", "x" * 129],
    ids=["none", "empty", "space", "non-ascii", "too long"],
)
def test_an_unusable_request_id_is_replaced_everywhere(sent_id: str | None) -> None:
    """The sidecar replaces such an id too: a plan bound to the client's would not verify there."""
    setup = PickerSetup(d="decode", p="prefill")
    headers = {} if sent_id is None else {wire.REQUEST_ID: sent_id}
    body = json.dumps({"model": "m", "prompt": LONG}).encode()
    request = HttpRequest("POST", "/v1/completions", headers)
    changes = dict(setup.picker.place(request, body, NOW).mutation.set)
    request_id = changes[wire.REQUEST_ID]
    assert usable_request_id(request_id) == request_id != sent_id
    plan = verify(changes[wire.PLAN], KEYS, request_id=request_id, now=NOW)
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE
    assert [trace.request_id for trace in setup.history.find(request_id)] == [request_id]


def test_a_usable_request_id_is_kept() -> None:
    setup = PickerSetup(d="decode")
    for request_id in ("!", "x" * 128, "a/b?c"):
        request = HttpRequest("GET", "/health", {wire.REQUEST_ID: request_id})
        changes = dict(setup.picker.place(request, b"", NOW).mutation.set)
        assert wire.REQUEST_ID not in changes
        verify(changes[wire.PLAN], KEYS, request_id=request_id, now=NOW)


@pytest.mark.parametrize(
    "path", [*PATHS.values(), "/v1/embeddings"], ids=[*map(str, PATHS), "embeddings"]
)
def test_a_body_nested_too_deeply_is_answered_with_400_and_the_place(path: str) -> None:
    setup = PickerSetup()
    setup.fleet.apply([backend("a", "decode", None, "m"), backend("b", "decode", None, "n")])
    body = b'{"model": "m", "input": ' + b'{"a":[' * 100_000
    with pytest.raises(NotPlaced) as reply:
        setup.picker.place(HttpRequest("POST", path, {}), body, NOW)
    assert reply.value.reply.status == 400
    assert b"nested too deeply (byte " in reply.value.reply.body


@pytest.mark.parametrize(
    ("text", "timeouts"),
    [
        ("{enabled: true, prefill_timeout: 5s, kv_transfer_timeout: 250ms}", Timeouts(5.0, 0.25)),
        ("{enabled: true, prefill_timeout: 2m}", Timeouts(120.0, None)),
        ("{enabled: true}", Timeouts(None, None)),
    ],
)
def test_the_plan_has_the_timeouts_that_the_configuration_states(
    text: str, timeouts: Timeouts
) -> None:
    setup = PickerSetup(d="decode", p="prefill")
    document = f"disaggregated_serving: {text}"
    setup.picker.routing = load_text(document, {}, lists_backends=False).routing
    assert setup.place()[1].timeouts == timeouts


@pytest.mark.parametrize(
    ("section", "limits"),
    [
        ("{enabled: true, max_regeneration: 1m, max_moves: 3}", ResumeLimits(60.0, 3)),
        ("{enabled: false}", None),
        ("{}", None),
    ],
)
def test_the_plan_asks_for_resumed_streams_as_the_configuration_does(
    section: str, limits: ResumeLimits | None
) -> None:
    setup = PickerSetup(d="decode", other="decode")
    assert setup.place()[1].resume is None
    setup.picker.routing = load_text(f"resume: {section}", {}, lists_backends=False).routing
    assert setup.place()[1].resume == limits


def test_without_keys_there_is_no_plan() -> None:
    setup = PickerSetup(d="decode")
    setup.picker.plan_keys = {}
    placement = setup.picker.place(HttpRequest("GET", "/health", {}), b"", NOW)
    assert wire.PLAN in placement.mutation.remove


@pytest.mark.parametrize("hint", ["10.0.0.2:8000", "10.0.0.2"])
def test_a_subset_hint_restricts_the_pods(hint: str) -> None:
    setup = PickerSetup(d1="decode", d2="decode")
    for _ in range(4):
        request = HttpRequest("GET", "/health", {}, frozenset({hint, "10.9.9.9:1"}))
        assert setup.picker.place(request, b"", NOW).decode.name == "d2"
    with pytest.raises(NotPlaced):
        setup.picker.place(HttpRequest("GET", "/health", {}, frozenset({"10.9.9.9:1"})), b"", NOW)


def test_alternates_are_named_if_configured() -> None:
    text = "plugins: [{type: max-score-picker, parameters: {maxNumOfEndpoints: 2}}]"
    setup = PickerSetup(text, d1="decode", d2="decode")
    assert setup.place("hi")[0].mutation.destination in (
        "10.0.0.1:8000,10.0.0.2:8000",
        "10.0.0.2:8000,10.0.0.1:8000",
    )


@pytest.mark.parametrize("text", CHOICES)
def test_tandems_envoy_gets_another_pod_for_what_the_chosen_one_does_not_take(text: str) -> None:
    setup = PickerSetup(text, d1="decode", d2="decode", d3="decode", p1="prefill")
    named = set()
    for _ in range(8):
        placement, plan = setup.place("hi")
        address = dict(placement.mutation.set)[wire.ALTERNATE_ENDPOINT]
        assert plan.alternates is not None
        assert [target.address for target in plan.alternates] == [address]
        assert address != placement.decode.address
        named.add(address)
    assert named == {f"10.0.0.{n}:8000" for n in (1, 2, 3)}


@pytest.mark.parametrize("text", CHOICES)
def test_a_single_decode_pod_has_no_alternate(text: str) -> None:
    setup = PickerSetup(text, d1="decode", p1="prefill")
    placement, plan = setup.place("hi")
    assert wire.ALTERNATE_ENDPOINT not in dict(placement.mutation.set)
    assert wire.ALTERNATE_ENDPOINT in placement.mutation.remove
    assert plan.alternates == ()


@pytest.mark.parametrize("text", CHOICES)
def test_the_alternate_of_a_pair_reads_the_kv_of_its_prefill_pods(text: str) -> None:
    setup = PickerSetup(text)
    pods = [
        backend(f"{role}-{n}{hash_}", role, hash_) for hash_ in "12" for role in ROLES for n in "ab"
    ]
    setup.fleet.apply(pods)
    for _ in range(8):
        placement, plan = setup.place()
        assert plan.path is RoutingPath.PREFILL_THEN_DECODE
        assert plan.alternates is not None
        (alternate,) = (setup[target.name] for target in plan.alternates)
        assert alternate.backend.compat == placement.decode.backend.compat
        assert alternate not in (placement.decode, *placement.prefill)


def test_alternates_of_the_decode_pod_have_its_compat_hash() -> None:
    text = "plugins: [{type: max-score-picker, parameters: {maxNumOfEndpoints: 3}}]"
    setup = PickerSetup(text)
    pods = [backend(f"{role}-{hash_}", role, hash_) for hash_ in "12" for role in ROLES]
    setup.fleet.apply(pods)
    placement, plan = setup.place()
    hashes = {pod.backend.compat for pod in (placement.decode, *placement.prefill)}
    named = {
        pod.name for pod in setup.fleet if str(pod.address) in str(placement.mutation.destination)
    }
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE
    assert named == {placement.decode.name}
    assert len(hashes) == 1


def test_a_scrape_changes_the_next_pick() -> None:
    setup = PickerSetup("plugins: [{type: queue-scorer}]", d1="decode", d2="decode")
    for name, waiting in (("d1", 5.0), ("d2", 0.0), ("d1", 0.0)):
        setup[name].apply_scrape(ScrapeResult(Gauges(waiting=waiting), b""))
        if name == "d2":
            setup.fleet.invalidate_views()
            assert {setup.place("hi")[0].decode.name for _ in range(8)} == {"d2"}
    setup.fleet.invalidate_views()
    assert {setup.place("hi")[0].decode.name for _ in range(20)} == {"d1", "d2"}


@pytest.mark.parametrize("scheduling", ["{}", WEIGHTED], ids=["cost", "scores"])
def test_a_prompt_counts_as_cached_only_after_a_2xx(scheduling: str) -> None:
    setup = PickerSetup(scheduling, d1="decode", d2="decode", p="prefill")
    first, plan = setup.place()
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE
    second, plan = setup.place()
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE, "its KV is not on the decode pod yet"
    first.on_response_headers(ResponseHeaders(None, 400), NOW)
    assert setup.place()[1].path is RoutingPath.PREFILL_THEN_DECODE, "an error left no KV"
    # By cost, a decode pod with a request less is worth a short transfer.
    if scheduling is WEIGHTED:
        assert second.decode is first.decode, "prompts with the same prefix go to the same pod"
    second.on_response_headers(ResponseHeaders(None, 200), NOW)
    assert setup.place()[1].path is RoutingPath.FAST_DECODE


@pytest.mark.parametrize("status", [502, 503])
def test_a_backend_that_failed_a_request_is_avoided_until_its_next_scrape(status: int) -> None:
    setup = PickerSetup(WEIGHTED, d1="decode", d2="decode", p="prefill")
    report = ScrapeResult(Gauges(), b"one")
    for pod in setup.fleet:
        pod.apply_scrape(report)
    failed, _ = setup.place()
    failed.on_response_headers(ResponseHeaders(None, status), NOW)
    failed.end(NOW)
    bad = failed.decode
    assert {setup.place("short")[0].decode for _ in range(3)}.isdisjoint({bad})
    assert bad.apply_scrape(report), "the scrape after a failure changes what scorers see"
    setup.fleet.invalidate_views()
    assert setup.place("short")[0].decode is bad


def test_the_only_decode_backend_is_chosen_again_after_a_failure() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    setup.place()[0].on_response_headers(ResponseHeaders(None, 503), NOW)
    assert setup.place()[0].decode is setup["d"]


def backend(name: str, role: str, compat: str | None = None, *models: str) -> DiscoveredBackend:
    # The address follows from the name, so that it stays when other backends change.
    url = f"http://10.0.{sum(name.encode()) % 250}.1:8000"
    return DiscoveredBackend(Backend(name, url, Role(role), models=models or ("m",), compat=compat))


def test_a_split_goes_to_a_decode_pod_whose_hash_has_a_prefill_pod() -> None:
    setup = PickerSetup()
    old = [backend("d-old", "decode", "1"), backend("p-old", "prefill", "1")]
    new = [backend("d-new", "decode", "2"), backend("p-new", "prefill", "2")]
    setup.fleet.apply([*old, new[0]])
    plans = [setup.place_alone(f"{i} {LONG}") for i in range(8)]
    assert {plan.decode.name for plan in plans} == {"d-old"}, (
        "the new decode pod has no prefill pod yet"
    )
    assert {target.name for plan in plans for target in plan.prefill} == {"p-old"}
    short = {setup.place_alone(f"short {i}").decode.name for i in range(8)}
    assert "d-new" in short, "requests without a split go there already"
    setup.fleet.apply([*old, *new])
    plans = [setup.place_alone(f"again {i} {LONG}") for i in range(16)]
    pairs = {(plan.decode.name, *(t.name for t in plan.prefill)) for plan in plans}
    assert pairs == {("d-old", "p-old"), ("d-new", "p-new")}


def test_without_a_prefill_pod_of_its_hash_a_decode_pod_serves_alone() -> None:
    setup = PickerSetup()
    setup.fleet.apply([backend("d", "decode", "2"), backend("p", "prefill", "1")])
    _, plan = setup.place()
    assert (plan.path, plan.reason) == (RoutingPath.FALLBACK, "no_prefill_backend")


COMPATS = st.sampled_from([None, "1", "2"])
MODELS = st.sampled_from([("m",), ("n",), ("m", "n"), ()])
FLEETS = st.lists(
    st.tuples(st.sampled_from(list(Role)), COMPATS, MODELS, st.booleans()), min_size=1, max_size=8
)


@given(fleet=FLEETS, model=st.sampled_from(["m", "n", None]), seed=st.integers(0, 9))
def test_no_request_is_handed_off_between_hashes(
    fleet: list[tuple[Role, str | None, tuple[str, ...], bool]], model: str | None, seed: int
) -> None:
    setup = PickerSetup()
    routing, metrics, history = setup.picker.routing, setup.metrics, setup.history
    setup.picker = EndpointPicker(setup.fleet, routing, metrics, history, Random(seed))
    members = {
        f"b{i}": DiscoveredBackend(
            Backend(f"b{i}", f"http://10.0.0.{i}:1", role, models=models, compat=compat),
            serving=serving,
        )
        for i, (role, compat, models, serving) in enumerate(fleet)
    }
    setup.fleet.apply(members.values())
    fields = {} if model is None else {"model": model}
    request = HttpRequest("POST", "/v1/completions", {})
    try:
        placement = setup.picker.place(
            request, json.dumps({"prompt": LONG, **fields}).encode(), NOW
        )
    except NotPlaced:
        assert not any(
            m.serving and (model is None or not m.backend.models or model in m.backend.models)
            for m in members.values()
        )
        return
    for pod in (placement.decode, *placement.prefill):
        member = members[pod.name]
        assert member.serving
        assert model is None or not pod.backend.models or model in pod.backend.models
        assert pod.backend.compat == placement.decode.backend.compat
    placement.end(NOW)
    assert all(pod.in_flight == 0 for pod in setup.fleet)


def test_counts_end_at_zero_after_the_pods_are_removed() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    placement, _ = setup.place()
    d, p = setup["d"], setup["p"]
    setup.fleet.apply([])
    placement.on_response_headers(ResponseHeaders(None, 503), NOW)
    placement.end(NOW)
    assert (d.in_flight, p.in_flight) == (0, 0)
    assert setup.refusal(b"{}")[0] == 503


def test_a_model_without_pods_is_503_for_ten_minutes_and_then_404() -> None:
    setup = PickerSetup()
    other = backend("b", "decode", None, "n")
    setup.fleet.apply([backend("a", "decode", None, "m"), other])
    setup.fleet.apply([other], now=NOW - 599)
    setup.fleet.apply([other], now=NOW - 1)
    status, error = setup.refusal(b'{"model": "m", "prompt": "x"}')
    assert (status, error["retry-after"]) == (503, "1")
    assert setup.refusal(b'{"model": "x", "prompt": "x"}')[0] == 404, "no pod ever listed it"
    setup.fleet.apply([other], now=NOW + 1)
    assert setup.refusal(b'{"model": "m", "prompt": "x"}')[0] == 404, (
        "removed more than ten minutes ago"
    )
    setup.fleet.apply([other, backend("a", "decode", None, "m")], now=NOW + 2)
    assert (
        setup.picker.place(
            HttpRequest("POST", "/v1/completions", {}), b'{"model": "m", "prompt": "x"}', NOW
        ).decode.name
        == "a"
    )


def test_with_several_models_any_json_goes_to_a_pod_with_its_model() -> None:
    setup = PickerSetup()
    setup.fleet.apply([backend("a", "decode", None, "m"), backend("b", "decode", None, "n")])
    counting = HttpRequest("POST", "/v1/messages/count_tokens", {})
    assert setup.picker.needs_body(counting)
    for model, name in (("m", "a"), ("n", "b")) * 3:
        placement = setup.picker.place(counting, b'{"model": "%s"}' % model.encode(), NOW)
        assert placement.decode.name == name
    assert setup.refusal(b'{"model": "x"}')[0] == 404
    assert setup.picker.place(counting, b"no JSON", NOW).decode.name in "ab"


def test_with_several_models_the_epp_answers_v1_models() -> None:
    setup = PickerSetup()
    pods = [backend("a", "decode", None, "m"), backend("b", "decode", None, "n", "k")]
    ask = HttpRequest("GET", "/v1/models?x=1", {})
    setup.fleet.apply(pods)
    with pytest.raises(NotPlaced) as refusal:
        setup.picker.place(ask, b"", NOW)
    answer = refusal.value.reply
    models = json.loads(answer.body)
    assert (answer.status, models["object"]) == (200, "list")
    assert [model["id"] for model in models["data"]] == ["k", "m", "n"]
    assert models["data"][0]["object"] == "model"
    assert setup.decisions("answered", "models") == 1
    setup.down("a")
    with pytest.raises(NotPlaced) as refusal:
        setup.picker.place(ask, b"", NOW)
    ids = [model["id"] for model in json.loads(refusal.value.reply.body)["data"]]
    assert ids == ["k", "n"], "models of ready pods only"
    setup.fleet.apply([pods[1], DiscoveredBackend(Backend("any", "http://10.1.1.1:1"))])
    assert setup.picker.place(ask, b"", NOW).decode.name in ("any", "b"), (
        "one pod lists no models, so a pod must answer"
    )
    setup.fleet.apply(pods[1:])
    assert setup.picker.place(ask, b"", NOW).decode.name == "b", "one pod lists all models"


def test_a_plan_is_valid_if_clocks_differ_by_a_minute() -> None:
    setup = PickerSetup(d="decode")
    placement = setup.picker.place(HttpRequest("GET", "/health", {wire.REQUEST_ID: "r"}), b"", NOW)
    header = dict(placement.mutation.set)[wire.PLAN]
    verify(header, KEYS, request_id="r", now=NOW + 60 + 30)


def test_the_404_for_an_unknown_model_lists_a_few_models() -> None:
    setup = PickerSetup()
    setup.fleet.apply([backend("a", "decode", None, *(f"m{i:02}" for i in range(20)))])
    _, error = setup.refusal(b'{"model": "x"}')
    assert str(error["message"]).endswith("`m06`, `m07` and 12 more.")
