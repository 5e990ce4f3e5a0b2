"""Metrics under llm-d's names: which exist, and that they count what happened."""

import json
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
from prometheus_client import generate_latest

from tandem_contract import headers as wire
from tandem_contract.config import HealthChecks
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_epp.backends.pods import Pod, ScrapeResult
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.exchange import HttpRequest, ResponseHeaders
from tandem_epp.flow.elsewhere import Group, Share
from tandem_epp.llmd.metrics.families import PREFIX, Pool
from tandem_epp.llmd.metrics.flow import add_flow_metrics
from tandem_epp.llmd.metrics.requests import MAX_MODELS, add_llmd_metrics
from tandem_epp.llmd.metrics.table import EXPORTED, MISSING
from tandem_epp.metrics.counters import Metrics
from tandem_epp.placement.history import Decision
from tandem_epp.process.discovery import DiscoveredBackend
from tandem_epp.request.model_rewrites import RewriteObject, RewriteRules, rewrite_rules
from tandem_epp.request.objectives import Objective

from ...placement.test_picker import LONG, NOW, PickerSetup

LLMD_0_10 = re.findall(
    r"\S+",
    """
request_total request_error_total request_duration_seconds request_size_bytes response_size_bytes
request_input_tokens request_output_tokens request_cached_tokens request_running
request_ntpot_seconds request_ttft_seconds request_streaming_tpot_seconds
request_streaming_itl_seconds
average_kv_cache_utilization average_queue_size average_running_requests
std_dev_kv_cache_utilization std_dev_queue_size std_dev_running_requests ready_endpoints
per_endpoint_queue_size scheduler_e2e_duration_seconds scheduler_attempts_total
request_processing_duration_seconds response_processing_duration_seconds
plugin_duration_seconds plugin_data_scope_violations_total info model_rewrite_decisions_total
datalayer_poll_errors_total datalayer_extract_errors_total
prefix_indexer_size prefix_indexer_hit_ratio prefix_indexer_hit_bytes
encoder_cache_queries_total encoder_cache_hits_total encoder_cache_hit_ratio
program_aware_jains_fairness_index program_aware_avg_wait_time_milliseconds
program_aware_attained_service_tokens
inference_request_metric request_predicted_ttft_seconds
request_ttft_prediction_duration_seconds request_predicted_tpot_seconds
request_tpot_prediction_duration_seconds request_slo_violation_total
disagg_decision_total pd_decision_total disaggregatedset_strict_header_no_match_total
disaggregatedset_revision_gating_share extproc_streams_inflight
flow_control_queue_size flow_control_queue_bytes flow_control_request_queue_duration_seconds
flow_control_requests_total flow_control_pool_saturation flow_control_stale_endpoints
flow_control_dispatch_cycle_duration_seconds flow_control_request_enqueue_duration_seconds
flow_control_capacity_utilization_* flow_control_global_capacity_utilization_*
flow_control_revocations_* flow_control_revocation_confirmation_seconds
flow_control_reclaim_target flow_control_pending_reclaim
extproc_stream_duration_seconds extproc_streams_total inflight_requests inflight_tokens
kv_cache_* moriio_dns_*
""",
)
OLDER = {
    "inference_objective_request_total", "inference_objective_request_error_total",
    "inference_objective_request_duration_seconds", "inference_objective_input_tokens",
    "inference_objective_prompt_cached_tokens", "inference_objective_running_requests",
    "inference_objective_request_predicted_ttft_seconds",
    "inference_pool_average_kv_cache_utilization", "inference_pool_average_queue_size",
    "inference_pool_average_running_requests", "inference_pool_ready_pods",
    "inference_pool_per_pod_queue_size", "inference_extension_scheduler_attempts_total",
    "llm_d_inference_scheduler_disagg_decision_total",
    "inference_extension_prefix_indexer_hit_ratio", "inference_extension_info",
    "inference_extension_model_rewrite_decisions_total",
    "inference_extension_flow_control_queue_size", "inference_extension_flow_control_queue_bytes",
}  # fmt: skip
MODEL = {"model_name": "m", "target_model_name": "m"}
FLOW = {**MODEL, "fairness_id": "default-flow", "priority": "0"}


class LlmdSetup(PickerSetup):
    """With metrics under llm-d's names."""

    def __init__(self, scheduling: str = "{}", **roles: str) -> None:
        super().__init__(scheduling, **roles)
        self.requests = add_llmd_metrics(self.metrics.registry, self.history, self.fleet)
        self.waiting: dict[Group, Share] = {}
        add_flow_metrics(self.metrics.registry, self.waiting, Pool("pool"))


def value(metrics: Metrics, name: str, labels: Mapping[str, str]) -> float | None:
    return metrics.registry.get_sample_value(name, dict(labels))


def load(pod: Pod, waiting: float, running: float, kv_usage: float) -> None:
    gauges = Gauges(running=running, waiting=waiting, kv_usage=kv_usage)
    pod.apply_scrape(ScrapeResult(gauges, b""))


def answer(setup: LlmdSetup, status: int = 200, timing: str = "", prompt: object = LONG) -> None:
    """Place a request, answer it as a stream of a sidecar, and end it."""
    placement, _ = setup.place(prompt)
    response = ResponseHeaders(timing or None, status, path="unified", is_stream=True)
    placement.on_response_headers(response, NOW)
    placement.end(NOW)


def test_every_metric_of_llm_d_is_in_the_table_once() -> None:
    exported = [each.names.name for each in EXPORTED]
    missing = [name for each in MISSING for name in each.names]
    assert sorted(exported + missing) == sorted(LLMD_0_10)
    assert {each.names.older for each in EXPORTED} - {""} == OLDER


@pytest.mark.interpreted
def test_the_metrics_that_the_table_names_instead_are_documented() -> None:
    ours = " ".join(each.ours for each in (*EXPORTED, *MISSING))
    names = set(re.findall(r"\btandem_epp_\w+", ours))
    root = Path(__file__).parents[4]
    documented = (root / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
    assert names
    assert {name for name in names if f"`{name}" not in documented} == set()


def test_all_exported_metrics_and_no_others_are_on_the_page() -> None:
    setup = LlmdSetup(d="unified")
    load(setup["d"], 0, 0, 0)
    answer(setup, timing="cached=1;computed=2")
    setup.refusal(b"{")
    page = generate_latest(setup.metrics.registry).decode()
    names = set(re.findall(r"^# TYPE (\S+) ", page, re.MULTILINE))
    own = {name for name in names if not name.startswith(("tandem_", "disaggregated_"))}
    expected = {PREFIX + each.names.name for each in EXPORTED} | OLDER
    assert own == expected


def test_what_waits_is_told_by_model_and_priority() -> None:
    setup = LlmdSetup(d="unified")
    split, whole = (Group("m", 7, is_split=is_split) for is_split in (True, False))
    setup.waiting |= {split: Share(2, 10), whole: Share(1, 5), Group(None, 0, False): Share(4, 40)}
    labels = {**FLOW, "priority": "7", "inference_pool": "pool"}

    def read(**changed: str) -> list[float | None]:
        names = ("llm_d_epp_flow_control_queue_", "inference_extension_flow_control_queue_")
        return [
            value(setup.metrics, name + what, labels | changed)
            for name in names
            for what in ("size", "bytes")
        ]

    unnamed = {"priority": "0", "model_name": "", "target_model_name": ""}
    assert read() == [3, 15] * 2
    assert read(**unnamed) == [4, 40] * 2
    setup.waiting.clear()
    # A scaler must read that nothing waits any more.
    assert read() == read(**unnamed) == [0, 0] * 2


def test_a_request_counts_while_it_runs_and_when_it_ends() -> None:
    setup = LlmdSetup(d="unified")
    placement, _ = setup.place()
    read = lambda name, labels=FLOW: value(setup.metrics, name, labels)  # noqa: E731
    assert read("llm_d_epp_request_total") == read("llm_d_epp_request_running") == 1
    assert read("inference_objective_running_requests", {"model_name": "m"}) == 1
    assert read("llm_d_epp_request_duration_seconds_count") == 0
    timing = "cached=300;computed=700"
    placement.on_response_headers(ResponseHeaders(timing, is_stream=True), NOW)
    placement.end(NOW)
    assert read("llm_d_epp_request_running") == 0
    assert read("llm_d_epp_request_duration_seconds_count") == 1
    assert read("llm_d_epp_request_ttft_seconds_count", {**FLOW, "streaming": "true"}) == 1
    assert read("llm_d_epp_request_input_tokens_sum") == 1000
    assert read("inference_objective_input_tokens_sum", MODEL) == 1000
    assert read("inference_objective_prompt_cached_tokens_sum", MODEL) == 300
    assert read("llm_d_epp_request_cached_tokens_sum") == 300


def test_prompts_of_which_the_answer_tells_nothing_count_as_estimated() -> None:
    setup = LlmdSetup(d="unified")
    answer(setup)
    assert value(setup.metrics, "inference_objective_input_tokens_sum", MODEL) == pytest.approx(
        setup.history.latest(1)[0].prompt_tokens
    )
    assert value(setup.metrics, "llm_d_epp_request_cached_tokens_count", FLOW) == 0


def test_errors_by_code() -> None:
    setup = LlmdSetup(d="unified")
    answer(setup, status=500)
    setup.refusal(b'{"model": "other", "prompt": "x"}')
    setup.refusal(b"{")
    for _ in range(HealthChecks().unhealthy_threshold):
        setup.down("d")
    setup.refusal(b'{"model": "m", "prompt": "x"}')
    page = generate_latest(setup.metrics.registry).decode()
    found = re.findall(
        r'^inference_objective_request_error_total\{error_code="(\w+)",model_name="(\w*)".* (\S+)$',
        page,
        re.MULTILINE,
    )
    assert sorted(found) == [
        ("BadRequest", "", "1.0"),
        ("ModelServerError", "m", "1.0"),
        ("NotFound", "other", "1.0"),
        ("ServiceUnavailable", "m", "1.0"),
    ]
    failed = {"status": "failure", "target_model_name": "m", "namespace": "", "port": ""}
    name = "inference_extension_scheduler_attempts_total"
    assert value(setup.metrics, name, {**failed, "pod_name": ""}) == 1


def test_choices_by_pod_and_kind_until_the_pod_leaves() -> None:
    setup = LlmdSetup(d="decode", p="prefill")
    for prompt in (LONG, "short"):
        answer(setup, prompt=prompt)
    kinds = {"plugin_name": "disagg-profile-handler", "plugin_type": "disagg-profile-handler"}
    for kind in ("prefill-decode", "decode-only"):
        labels = {**kinds, "model_name": "m", "decision_type": kind}
        assert value(setup.metrics, "llm_d_epp_disagg_decision_total", labels) == 1, kind
    chosen = {"status": "success", "target_model_name": "m", "namespace": "", "port": "8000"}
    name = "llm_d_epp_scheduler_attempts_total"
    assert value(setup.metrics, name, {**chosen, "endpoint_name": "d"}) == 2
    setup.fleet.apply([])
    assert value(setup.metrics, name, {**chosen, "endpoint_name": "d"}) is None


def test_mean_spread_and_queue_of_the_pods_that_answer() -> None:
    setup = LlmdSetup(a="unified", b="unified", c="unified")
    metrics = Metrics(setup.fleet)
    add_llmd_metrics(metrics.registry, setup.history, setup.fleet, Pool("pool", "ns"))
    name = {"name": "pool"}
    assert value(metrics, "inference_pool_ready_pods", name) == 0
    assert value(metrics, "inference_pool_average_queue_size", name) is None
    load(setup["a"], 1, 2, 0.25)
    load(setup["b"], 3, 4, 0.75)
    load(setup["c"], 90, 90, 0.9)
    for _ in range(HealthChecks().unhealthy_threshold):
        setup.down("c")
    read = lambda each: value(metrics, each, name)  # noqa: E731
    assert read("inference_pool_ready_pods") == read("llm_d_epp_ready_endpoints") == 2
    assert read("inference_pool_average_queue_size") == read("llm_d_epp_average_queue_size") == 2
    assert read("inference_pool_average_running_requests") == 3
    assert read("inference_pool_average_kv_cache_utilization") == 0.5
    assert read("llm_d_epp_std_dev_queue_size") == pytest.approx(2**0.5)
    placed = {"fairness_id": "default-flow", "priority": "0", "namespace": "ns"}
    placed |= {"endpoint_name": "a", "producer_name": "inflight-load-producer"}
    assert value(metrics, "llm_d_epp_inflight_requests", placed) == 0
    setup["a"].in_flight += 1
    assert value(metrics, "llm_d_epp_inflight_requests", placed) == 1
    old = {**name, "model_server_pod": "b"}
    assert value(metrics, "inference_pool_per_pod_queue_size", old) == 3


def test_names_that_clients_choose_are_bounded() -> None:
    """A name is a label once an engine has answered for it, and only so many are."""
    setup = LlmdSetup(d="unified")
    lists_none = msgspec.structs.replace(setup["d"].backend, models=())
    setup.fleet.apply([DiscoveredBackend(lists_none)])

    def ask(model: str, status: int) -> None:
        decision = Decision("r", NOW, path=RoutingPath.UNIFIED)
        decision.model, decision.status = model, status
        setup.requests.begin(decision)
        setup.requests.end(decision)

    def models() -> set[str]:
        page = generate_latest(setup.metrics.registry).decode()
        return set(re.findall(r'^llm_d_epp_request_total\{.*?model_name="([^"]*)"', page, re.M))

    for number in range(30_000):
        ask(f"invented-{number}", 404)
    page = generate_latest(setup.metrics.registry).decode()
    assert models() == {"other"}
    assert "invented" not in page
    assert page.count("\n") < 1000
    # An engine that answers for any name.
    for number in range(MAX_MODELS + 10):
        ask(f"served-{number}", 200)
    assert len(models()) == MAX_MODELS
    assert {"other", "served-1"} < models()
    # Each request ends where it was counted.
    running = re.findall(
        r"^llm_d_epp_request_running\{.* (\S+)$",
        generate_latest(setup.metrics.registry).decode(),
        re.M,
    )
    assert set(running) == {"0.0"}


def test_many_ended_requests_are_counted_before_the_scrape() -> None:
    """What waits for a scrape must not grow with the requests since the last one."""
    setup = LlmdSetup(d="unified")
    for _ in range(1000):
        answer(setup, prompt="x")
    requests = setup.requests
    waiting = len(requests._ended) + len(requests._begun)
    assert waiting < 600
    assert value(setup.metrics, "llm_d_epp_request_total", FLOW) == 1000


def test_requests_count_by_priority_and_under_the_name_that_the_client_used() -> None:
    setup = LlmdSetup(d="unified")
    rule = {"matches": [{"model": {"value": "alias"}}], "targets": [{"modelRewrite": "m"}]}
    rules = rewrite_rules({"rules": [rule]}, "aliases")
    setup.picker.rewrites.rules = RewriteRules([RewriteObject("2026", "aliases", rules)])
    setup.picker.objectives.replace([Objective("premium", 10)])
    for model, objective in (("alias", "premium"), ("alias", ""), ("m", "premium"), ("m", "x")):
        headers = {wire.OBJECTIVE: objective}
        request = HttpRequest("POST", "/v1/completions", headers)
        body = json.dumps({"model": model, "prompt": "x"}).encode()
        placement = setup.picker.place(request, body, NOW)
        placement.on_response_headers(ResponseHeaders("cached=1;computed=2", 200), NOW)
        placement.end(NOW)
        trace = setup.history.latest(1)[0]
        assert (trace.asked, trace.model) == ("alias" if model == "alias" else "", "m")
        assert trace.priority == (10 if objective == "premium" else 0)
    for model in ("alias", "m"):
        for priority in ("10", "0"):
            labels = {**FLOW, "model_name": model, "priority": priority}
            assert value(setup.metrics, "llm_d_epp_request_total", labels) == 1
    alias = {**MODEL, "model_name": "alias"}
    assert value(setup.metrics, "inference_objective_input_tokens_sum", alias) == 6, "no priority"
    assert value(setup.metrics, "inference_objective_running_requests", {"model_name": "m"}) == 0
    for name in ("llm_d_epp", "inference_extension"):
        labels = {"model_rewrite_name": "aliases", "model_name": "alias", "target_model": "m"}
        assert value(setup.metrics, f"{name}_model_rewrite_decisions_total", labels) == 2


def test_probes_and_lists_of_models_are_no_requests() -> None:
    setup = LlmdSetup(d="unified")
    request = HttpRequest("GET", "/health", {wire.REQUEST_ID: "r"})
    setup.picker.place(request, b"", NOW).end(NOW)
    page = generate_latest(setup.metrics.registry).decode()
    assert "llm_d_epp_request_total{" not in page


def test_a_timing_without_figures_changes_nothing() -> None:
    assert Timing().prompt_tokens is None
    setup = LlmdSetup(d="unified")
    answer(setup, timing="-")
    assert value(setup.metrics, "llm_d_epp_request_total", FLOW) == 1
