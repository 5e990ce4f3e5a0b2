"""From a request to headers: every path, every refusal, and exact counts."""

import json
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract import headers as wire
from tandem_contract.config import Backend, DisaggregatedServing
from tandem_contract.documents import parse_documents
from tandem_contract.paths import Role, RoutingPath
from tandem_contract.plan import Plan, key_id, verify
from tandem_contract.request_ids import usable_request_id
from tandem_contract.request_kinds import PATHS
from tandem_contract.timing import Timing
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Gauges, Pod, ScrapeResult
from tandem_epp.configuration import Routing
from tandem_epp.ext_proc.messages import HttpRequest
from tandem_epp.ext_proc.stream import LocalReply
from tandem_epp.history import History
from tandem_epp.metrics import Metrics
from tandem_epp.picker import EndpointPicker
from tandem_epp.placement import Placement
from tandem_epp.scheduling.config import load_scheduling

KEYS = {"k": b"0123456789abcdef"}
LONG = "word " * 400
NOW = 1000.0
ROLES = ("decode", "prefill")


class World:
    """A picker over backends `name: role`, each at 10.0.0.N:8000."""

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

    def down(self, name: str) -> None:
        self[name].record_scrape_failure()
        self.fleet.invalidate_views()

    def place(self, prompt: object = LONG, **fields: object) -> tuple[Placement, Plan]:
        body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
        request = HttpRequest("POST", "/v1/completions?x=1", {wire.REQUEST_ID: "r"})
        placement = self.picker.place(request, body, NOW)
        header = dict(placement.mutation.set)[wire.PLAN]
        return placement, verify(header, KEYS, request_id="r", now=NOW)

    def refused(self, body: bytes, **request: str) -> tuple[int, dict[str, object]]:
        http = HttpRequest("POST", "/v1/completions", request)
        with pytest.raises(LocalReply) as refusal:
            self.picker.place(http, body, NOW)
        response = refusal.value.response
        error = json.loads(response.body)["error"]
        assert error["code"] == response.status
        return response.status, {**error, **dict(response.headers)}

    def decisions(self, path: str, reason: str) -> float | None:
        labels = {"path": path, "reason": reason}
        return self.metrics.registry.get_sample_value("tandem_epp_decisions_total", labels)


def test_the_next_key_signs_when_its_time_has_come_though_no_file_changed() -> None:
    world = World(d="decode")
    keys = {key_id(at): b"0123456789abcdef" for at in (NOW - 60, NOW + 60)}
    world.picker.plan_keys = keys
    signed_by = []
    for now in (NOW, NOW + 59, NOW + 60):
        request = HttpRequest("POST", "/v1/completions", {wire.REQUEST_ID: "r"})
        placement = world.picker.place(request, b'{"model": "m", "prompt": "x"}', now)
        header = dict(placement.mutation.set)[wire.PLAN]
        verify(header, keys, request_id="r", now=now)
        signed_by.append(header.split(".")[1])
    assert signed_by == [key_id(NOW - 60), key_id(NOW - 60), key_id(NOW + 60)]


def test_a_split_names_both_pods_and_overwrites_what_was_there() -> None:
    world = World(d="decode", p1="prefill", p2="prefill")
    world["p1"].in_flight = 5
    placement, plan = world.place()
    headers = dict(placement.mutation.set)
    assert headers[wire.DESTINATION_ENDPOINT] == placement.mutation.destination == "10.0.0.1:8000"
    assert headers[wire.PREFILLER_HOST_PORT] == "10.0.0.3:8000,10.0.0.2:8000"
    assert set(placement.mutation.remove) == wire.INTERNAL - headers.keys()
    assert wire.REQUEST_ID not in headers
    assert (plan.path, plan.reason) == (RoutingPath.PREFILL_THEN_DECODE, "worth_it")
    assert (plan.decode.name, [p.name for p in plan.prefill]) == ("d", ["p2", "p1"])
    assert plan.expires > NOW
    assert world.decisions("prefill_then_decode", "worth_it") == 1


def test_what_was_answered_is_known_as_cached_on_both_pods() -> None:
    world = World(d1="decode", d2="decode", p="prefill")
    first, _ = world.place()
    first.on_response_headers(None, 200)
    _, again = world.place()
    assert again.path is RoutingPath.FAST_DECODE
    assert again.decode.name == first.decode.name
    assert again.cached_tokens == 496
    world.down(first.decode.name)
    other, plan = world.place()
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE
    assert other.decode is not first.decode


def test_a_short_prompt_a_batch_and_a_disabled_split_are_unified() -> None:
    world = World(d="decode", p="prefill")
    assert world.place("hi")[1].reason == "short_prompt"
    assert world.place([LONG, LONG])[1].reason == "batch"
    assert world.place(LONG, n=2)[1].reason == "n"
    assert World(enabled=False, d="decode", p="prefill").place()[1].reason == "not_disaggregated"
    assert World(u="unified", v="unified").place()[1].path is RoutingPath.UNIFIED


def test_a_unified_backend_prefills_for_others_and_not_for_itself() -> None:
    world = World(d="decode", u="unified")
    world["u"].in_flight = 9
    assert [p.name for p in world.place()[1].prefill] == ["u"]
    alone = World(p="prefill", u="unified")
    assert [p.name for p in alone.place()[1].prefill] == ["p"]
    alone.down("p")
    assert alone.place("new " * 400)[1].path is RoutingPath.FALLBACK


def test_no_prefill_backend_falls_back_or_is_refused() -> None:
    world = World(d="decode", p="prefill")
    world.down("p")
    assert world.place()[1].path is RoutingPath.FALLBACK
    strict = World(d="decode", p="prefill", strict="")
    strict.down("p")
    status, error = strict.refused(json.dumps({"prompt": LONG}).encode())
    assert (status, error["retry-after"]) == (503, "1")


def test_without_a_decode_backend_any_engine_serves() -> None:
    world = World(d="decode", p="prefill")
    world.down("d")
    placement, plan = world.place()
    assert (placement.decode.name, plan.path) == ("p", RoutingPath.FALLBACK)
    assert plan.reason == "no_decode_backend"
    world.down("p")
    assert world.refused(b"{}")[0] == 503


@pytest.mark.parametrize(
    "said",
    [
        pytest.param(r'"kv_transfer_params": {"do_remote_prefill": true}', id="kv"),
        pytest.param(r'"\u006bv_transfer_params": {}', id="escaped"),
        pytest.param('"vllm_xargs": {"kv_transfer_params": {}}', id="nested"),
    ],
)
def test_no_engine_without_a_sidecar_is_told_what_clients_may_not_say(said: str) -> None:
    world = World(d="decode", p="prefill")
    body = b'{"model": "m", "prompt": "x", %s}' % said.encode()
    world.down("d")
    assert world.refused(body)[0] == 503
    unread = HttpRequest("POST", "/v1/embeddings", {wire.REQUEST_ID: "r"})
    with pytest.raises(LocalReply):
        world.picker.place(unread, b"", NOW)
    assert world.picker.place(HttpRequest("GET", "/health", {}), b"", NOW).decode is world["p"]


def test_counts_follow_a_request_and_end_at_zero() -> None:
    world = World(d="decode", p="prefill")
    placement, _ = world.place()
    assert (world["d"].in_flight, world["p"].in_flight) == (1, 1)
    placement.on_response_headers(Timing(compute=0.5, cached=10, computed=40).encode(), 200, "p")
    assert (world["d"].in_flight, world["p"].in_flight) == (1, 0)
    placement.on_response_headers(None, 200)
    placement.end()
    assert (world["d"].in_flight, world["p"].in_flight) == (0, 0)
    assert (world["p"].prefill_rate, world["d"].prefill_rate) == (80, None)
    sample = world.metrics.registry.get_sample_value
    assert sample("tandem_epp_prefix_hit_ratio_sum", {"source": "measured"}) == 0.2
    early, _ = world.place()
    early.end()
    assert (world["d"].in_flight, world["p"].in_flight) == (0, 0)


def test_timing_is_credited_to_the_backend_that_computed() -> None:
    world = World(d="decode", p1="prefill", p2="prefill")
    timing = Timing(compute=1.0, computed=100).encode()
    placement, plan = world.place()
    retried = plan.prefill[1].name
    placement.on_response_headers(timing, 200, retried)
    rates = {pod.name: pod.prefill_rate for pod in world.fleet}
    assert rates == {"d": None, "p1": None, "p2": None, retried: 100}
    placement, _ = world.place("other " * 400)
    placement.on_response_headers(timing, 200, None)
    assert world["d"].prefill_rate == 100, "it fell back: the decode backend computed"


def test_refusals() -> None:
    world = World(d="decode")
    status, error = world.refused(b'{"model": "other"}')
    assert (status, error["param"]) == (404, "model")
    assert error["message"] == "The model `other` does not exist. This endpoint serves `m`."
    assert world.refused(b"{")[0] == 400
    assert json.loads(world.picker.body_too_large(5).response.body)["error"]["code"] == 413
    assert world.decisions("refused", "unknown_model") == 1


@pytest.mark.parametrize(
    "request_head",
    [
        HttpRequest("GET", "/v1/models", {}),
        HttpRequest("POST", "/v1/embeddings", {}),
        HttpRequest("POST", "/v1/completions", {"content-type": "text/plain"}),
    ],
)
def test_what_is_not_read_passes_through_with_an_id(request_head: HttpRequest) -> None:
    world = World(d="decode", p="prefill")
    assert not world.picker.needs_body(request_head)
    placement = world.picker.place(request_head, b"", NOW)
    headers = dict(placement.mutation.set)
    assert headers[wire.DESTINATION_ENDPOINT] == "10.0.0.1:8000"
    plan = verify(headers[wire.PLAN], KEYS, request_id=headers[wire.REQUEST_ID], now=NOW)
    assert (plan.path, plan.reason) == (RoutingPath.UNIFIED, "passthrough")


@pytest.mark.parametrize(
    "given",
    [None, "", "two words", "caf\xe9", "x" * 129],
    ids=["none", "empty", "space", "non-ascii", "too long"],
)
def test_an_unusable_request_id_is_replaced_everywhere(given: str | None) -> None:
    """The sidecar replaces such an id too: a plan bound to the client's would not verify there."""
    world = World(d="decode", p="prefill")
    headers = {} if given is None else {wire.REQUEST_ID: given}
    body = json.dumps({"model": "m", "prompt": LONG}).encode()
    request = HttpRequest("POST", "/v1/completions", headers)
    changes = dict(world.picker.place(request, body, NOW).mutation.set)
    request_id = changes[wire.REQUEST_ID]
    assert usable_request_id(request_id) == request_id != given
    plan = verify(changes[wire.PLAN], KEYS, request_id=request_id, now=NOW)
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE
    assert [trace.request_id for trace in world.history.find(request_id)] == [request_id]


def test_a_usable_request_id_is_kept() -> None:
    world = World(d="decode")
    for request_id in ("!", "x" * 128, "a/b?c"):
        request = HttpRequest("GET", "/", {wire.REQUEST_ID: request_id})
        changes = dict(world.picker.place(request, b"", NOW).mutation.set)
        assert wire.REQUEST_ID not in changes
        verify(changes[wire.PLAN], KEYS, request_id=request_id, now=NOW)


@pytest.mark.parametrize(
    "path", [*PATHS.values(), "/v1/embeddings"], ids=[*map(str, PATHS), "embeddings"]
)
def test_a_body_nested_too_deeply_is_answered_with_400_and_the_place(path: str) -> None:
    world = World()
    world.fleet.apply([backend("a", "decode", None, "m"), backend("b", "decode", None, "n")])
    body = b'{"model": "m", "input": ' + b'{"a":[' * 100_000
    with pytest.raises(LocalReply) as reply:
        world.picker.place(HttpRequest("POST", path, {}), body, NOW)
    assert reply.value.response.status == 400
    assert b"nested too deeply (byte " in reply.value.response.body


def test_without_keys_there_is_no_plan() -> None:
    world = World(d="decode")
    world.picker.plan_keys = {}
    placement = world.picker.place(HttpRequest("GET", "/", {}), b"", NOW)
    assert wire.PLAN in placement.mutation.remove


@pytest.mark.parametrize("hint", ["10.0.0.2:8000", "10.0.0.2"])
def test_a_subset_hint_is_kept_to(hint: str) -> None:
    world = World(d1="decode", d2="decode")
    for _ in range(4):
        request = HttpRequest("GET", "/", {}, frozenset({hint, "10.9.9.9:1"}))
        assert world.picker.place(request, b"", NOW).decode.name == "d2"
    with pytest.raises(LocalReply):
        world.picker.place(HttpRequest("GET", "/", {}, frozenset({"10.9.9.9:1"})), b"", NOW)


def test_alternates_are_named_when_asked_for() -> None:
    text = "plugins: [{type: max-score-picker, parameters: {maxNumOfEndpoints: 2}}]"
    world = World(text, d1="decode", d2="decode")
    assert world.place("hi")[0].mutation.destination in (
        "10.0.0.1:8000,10.0.0.2:8000",
        "10.0.0.2:8000,10.0.0.1:8000",
    )


def test_who_stands_in_for_the_decode_pod_can_read_the_same_kv() -> None:
    text = "plugins: [{type: max-score-picker, parameters: {maxNumOfEndpoints: 3}}]"
    world = World(text)
    pods = [backend(f"{role}-{hash_}", role, hash_) for hash_ in "12" for role in ROLES]
    world.fleet.apply(pods)
    placement, plan = world.place()
    hashes = {pod.backend.compat for pod in (placement.decode, *placement.prefill)}
    named = {
        pod.name for pod in world.fleet if str(pod.address) in str(placement.mutation.destination)
    }
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE
    assert named == {placement.decode.name}
    assert len(hashes) == 1


def test_a_scrape_moves_the_next_pick() -> None:
    world = World("plugins: [{type: queue-scorer}]", d1="decode", d2="decode")
    for name, waiting in (("d1", 5.0), ("d2", 0.0), ("d1", 0.0)):
        world[name].apply_scrape(ScrapeResult(Gauges(waiting=waiting), b""))
        if name == "d2":
            world.fleet.invalidate_views()
            assert {world.place("hi")[0].decode.name for _ in range(8)} == {"d2"}
    world.fleet.invalidate_views()
    assert {world.place("hi")[0].decode.name for _ in range(20)} == {"d1", "d2"}


def test_a_prompt_counts_as_cached_once_it_is_answered_and_not_while_it_is_under_way() -> None:
    world = World(d1="decode", d2="decode", p="prefill")
    first, plan = world.place()
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE
    second, plan = world.place()
    assert plan.path is RoutingPath.PREFILL_THEN_DECODE, "its KV is not there yet"
    first.on_response_headers(None, 400)
    assert world.place()[1].path is RoutingPath.PREFILL_THEN_DECODE, "an error left no KV"
    assert second.decode is first.decode, "its like goes to the same pod"
    second.on_response_headers(None, 200)
    assert world.place()[1].path is RoutingPath.FAST_DECODE


@pytest.mark.parametrize("status", [502, 503])
def test_a_backend_that_fails_a_request_is_passed_over_until_it_is_scraped(status: int) -> None:
    world = World(d1="decode", d2="decode", p="prefill")
    report = ScrapeResult(Gauges(), b"one")
    for pod in world.fleet:
        pod.apply_scrape(report)
    failed, _ = world.place()
    failed.on_response_headers(None, status)
    failed.end()
    bad = failed.decode
    assert {world.place("short")[0].decode for _ in range(3)}.isdisjoint({bad})
    assert bad.apply_scrape(report), "a scrape that tells it is well changes what scorers see"
    world.fleet.invalidate_views()
    assert world.place("short")[0].decode is bad


def test_the_only_decode_backend_is_asked_again_after_it_failed() -> None:
    world = World(d="decode", p="prefill")
    world.place()[0].on_response_headers(None, 503)
    assert world.place()[0].decode is world["d"]


def backend(name: str, role: str, compat: str | None = None, *models: str) -> DiscoveredBackend:
    # The address follows the name, so that a change of others is none of this one's.
    url = f"http://10.0.{sum(name.encode()) % 250}.1:8000"
    return DiscoveredBackend(Backend(name, url, Role(role), models=models or ("m",), compat=compat))


def test_only_pods_of_one_hash_are_paired_and_the_split_goes_where_partners_are() -> None:
    world = World()
    old = [backend("d-old", "decode", "1"), backend("p-old", "prefill", "1")]
    new = [backend("d-new", "decode", "2"), backend("p-new", "prefill", "2")]
    world.fleet.apply([*old, new[0]])
    plans = [world.place(f"{i} {LONG}")[1] for i in range(8)]
    assert {plan.decode.name for plan in plans} == {"d-old"}, "the new one has no partner yet"
    assert {target.name for plan in plans for target in plan.prefill} == {"p-old"}
    short = {world.place(f"short {i}")[1].decode.name for i in range(8)}
    assert "d-new" in short, "what needs no partner goes there already"
    world.fleet.apply([*old, *new])
    plans = [world.place(f"again {i} {LONG}")[1] for i in range(16)]
    pairs = {(plan.decode.name, *(t.name for t in plan.prefill)) for plan in plans}
    assert pairs == {("d-old", "p-old"), ("d-new", "p-new")}


def test_a_pod_alone_with_its_hash_prefills_itself() -> None:
    world = World()
    world.fleet.apply([backend("d", "decode", "2"), backend("p", "prefill", "1")])
    _, plan = world.place()
    assert (plan.path, plan.reason) == (RoutingPath.FALLBACK, "no_prefill_backend")


COMPATS = st.sampled_from([None, "1", "2"])
MODELS = st.sampled_from([("m",), ("n",), ("m", "n"), ()])
FLEETS = st.lists(
    st.tuples(st.sampled_from(list(Role)), COMPATS, MODELS, st.booleans()), min_size=1, max_size=8
)


@given(fleet=FLEETS, model=st.sampled_from(["m", "n", None]), seed=st.integers(0, 9))
def test_no_request_is_ever_handed_across(
    fleet: list[tuple[Role, str | None, tuple[str, ...], bool]], model: str | None, seed: int
) -> None:
    world = World()
    routing, metrics, history = world.picker.routing, world.metrics, world.history
    world.picker = EndpointPicker(world.fleet, routing, metrics, history, Random(seed))
    members = {
        f"b{i}": DiscoveredBackend(
            Backend(f"b{i}", f"http://10.0.0.{i}:1", role, models=models, compat=compat),
            serving=serving,
        )
        for i, (role, compat, models, serving) in enumerate(fleet)
    }
    world.fleet.apply(members.values())
    fields = {} if model is None else {"model": model}
    request = HttpRequest("POST", "/v1/completions", {})
    try:
        placement = world.picker.place(
            request, json.dumps({"prompt": LONG, **fields}).encode(), NOW
        )
    except LocalReply:
        assert not any(
            m.serving and (model is None or not m.backend.models or model in m.backend.models)
            for m in members.values()
        )
        return
    for pod in (placement.decode, *placement.prefill):
        chosen = members[pod.name]
        assert chosen.serving
        assert model is None or not pod.backend.models or model in pod.backend.models
        assert pod.backend.compat == placement.decode.backend.compat
    placement.end()
    assert all(pod.in_flight == 0 for pod in world.fleet)


def test_counts_end_cleanly_after_the_pods_are_gone() -> None:
    world = World(d="decode", p="prefill")
    placement, _ = world.place()
    d, p = world["d"], world["p"]
    world.fleet.apply([])
    placement.on_response_headers(None, 503)
    placement.end()
    assert (d.in_flight, p.in_flight) == (0, 0)
    assert world.refused(b"{}")[0] == 503


def test_a_model_whose_pods_all_went_is_missed_for_a_while_and_then_unknown() -> None:
    world = World()
    other = backend("b", "decode", None, "n")
    world.fleet.apply([backend("a", "decode", None, "m"), other])
    world.fleet.apply([other], now=NOW - 599)
    world.fleet.apply([other], now=NOW - 1)
    status, error = world.refused(b'{"model": "m", "prompt": "x"}')
    assert (status, error["retry-after"]) == (503, "1")
    assert world.refused(b'{"model": "x", "prompt": "x"}')[0] == 404, "nobody ever had it"
    world.fleet.apply([other], now=NOW + 1)
    assert world.refused(b'{"model": "m", "prompt": "x"}')[0] == 404, "too long ago"
    world.fleet.apply([other, backend("a", "decode", None, "m")], now=NOW + 2)
    assert (
        world.picker.place(
            HttpRequest("POST", "/v1/completions", {}), b'{"model": "m", "prompt": "x"}', NOW
        ).decode.name
        == "a"
    )


def test_where_models_differ_any_json_goes_to_its_model() -> None:
    world = World()
    world.fleet.apply([backend("a", "decode", None, "m"), backend("b", "decode", None, "n")])
    embeddings = HttpRequest("POST", "/v1/embeddings", {})
    assert world.picker.needs_body(embeddings)
    for model, name in (("m", "a"), ("n", "b")) * 3:
        placement = world.picker.place(embeddings, b'{"model": "%s"}' % model.encode(), NOW)
        assert placement.decode.name == name
    assert world.refused(b'{"model": "x"}')[0] == 404
    assert world.picker.place(embeddings, b"no JSON", NOW).decode.name in "ab"


def test_where_models_differ_the_list_of_them_is_answered_here() -> None:
    world = World()
    pods = [backend("a", "decode", None, "m"), backend("b", "decode", None, "n", "k")]
    ask = HttpRequest("GET", "/v1/models?x=1", {})
    world.fleet.apply(pods)
    with pytest.raises(LocalReply) as refusal:
        world.picker.place(ask, b"", NOW)
    answer = refusal.value.response
    said = json.loads(answer.body)
    assert (answer.status, said["object"]) == (200, "list")
    assert [model["id"] for model in said["data"]] == ["k", "m", "n"]
    assert said["data"][0]["object"] == "model"
    assert world.decisions("answered", "models") == 1
    world.down("a")
    with pytest.raises(LocalReply) as refusal:
        world.picker.place(ask, b"", NOW)
    ids = [model["id"] for model in json.loads(refusal.value.response.body)["data"]]
    assert ids == ["k", "n"], "of those that are ready"
    world.fleet.apply([pods[1], DiscoveredBackend(Backend("any", "http://10.1.1.1:1"))])
    assert world.picker.place(ask, b"", NOW).decode.name in ("any", "b"), "it alone knows its own"
    world.fleet.apply(pods[1:])
    assert world.picker.place(ask, b"", NOW).decode.name == "b", "one pod knows all there are"


def test_a_plan_holds_where_clocks_differ_by_a_minute() -> None:
    world = World(d="decode")
    placement = world.picker.place(HttpRequest("GET", "/", {wire.REQUEST_ID: "r"}), b"", NOW)
    header = dict(placement.mutation.set)[wire.PLAN]
    verify(header, KEYS, request_id="r", now=NOW + 60 + 30)


def test_a_refusal_lists_a_few_models() -> None:
    world = World()
    world.fleet.apply([backend("a", "decode", None, *(f"m{i:02}" for i in range(20)))])
    _, error = world.refused(b'{"model": "x"}')
    assert str(error["message"]).endswith("`m06`, `m07` and 12 more.")
