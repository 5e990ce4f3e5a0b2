"""The configurations that llm-d ships: which load, what they do, and what is said of the others.

`llmd_configs` holds one file for each file of deploy/config in llm-d-router 0.10, under its name,
with the same plugins and parameters.
"""

import logging
from base64 import b64encode
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from tandem_contract.config import Backend
from tandem_contract.documents import DocumentError
from tandem_contract.labels import HOSTNAME
from tandem_contract.paths import Role, RoutingPath
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.choice.context import ChoiceContext
from tandem_epp.choice.result import SchedulingResult
from tandem_epp.choice.routing import Scheduling
from tandem_epp.choice.scheduler import Scheduler
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.flow.ceilings import SoftCeilings
from tandem_epp.main import main
from tandem_epp.process.configuration import load, log_notices
from tandem_epp.request.inference import InferenceRequest

CONFIGS = Path(__file__).parent / "llmd_configs"
REFUSED = {
    "epp-mm-embeddings-cache-config": (
        18,
        "'mm-embeddings-cache-producer' is not supported: the EPP does not know which pod has "
        "encoded which image; nearest: 'precise-prefix-cache-producer'; nor "
        "'mm-embeddings-cache-scorer' in line 20",
    ),
    "probabilistic-admitter-epp-config": (
        10,
        "'probabilistic-admitter' is not supported: the EPP refuses no request by load; nearest: "
        "'load-aware-scorer'",
    ),
    "sim-e-p-d-epp-config": (
        11,
        "'always-disagg-multimodal-decider' is not supported: no pods of their own encode media: "
        "the pod that prefills does it; nearest: 'always-disagg-pd-decider'; nor 'encode-filter' "
        "in line 14",
    ),
    "sim-e-pd-epp-config": (
        9,
        "'always-disagg-multimodal-decider' is not supported: no pods of their own encode media: "
        "the pod that prefills does it; nearest: 'always-disagg-pd-decider'; nor 'encode-filter' "
        "in line 11",
    ),
    "sim-epp-gpu-config": (
        8,
        "'dcgm-data-source' is not supported: the EPP reads the engines' metrics and none of GPUs "
        "or of other exporters; nearest: 'metrics-data-source'; nor 'dcgm-extractor' in line 9, "
        "'endpoint-attribute-scorer' in line 10, 'endpoint-attribute-filter' in line 16",
    ),
}
NAMES = sorted(file.stem for file in CONFIGS.glob("*.yaml"))
LOADED = [name for name in NAMES if name not in REFUSED]
SPLIT = ("pd-epp-config", "pd-topology-epp-config", "sim-pd-epp-config")
LONG = b"x" * 4 * 64


class Setup:
    """A scheduler with the pods `name=role`, each on a host of its own."""

    def __init__(self, config: str, hosts: dict[str, str] | None = None, **roles: str) -> None:
        routing = load(CONFIGS / f"{config}.yaml", {}, lists_backends=False).routing
        self.scheduling: Scheduling = routing.scheduling
        self.fleet = Fleet()
        self.fleet.apply(
            DiscoveredBackend(
                Backend(
                    name=name,
                    url=f"http://10.0.0.{i}:8000",
                    role=Role(role),
                    labels={HOSTNAME: (hosts or {}).get(name, name)},
                )
            )
            for i, (name, role) in enumerate(roles.items(), 1)
        )
        self._scheduler = Scheduler(self.fleet, routing, Random(7))

    def __getitem__(self, name: str) -> Pod:
        pod = self.fleet.find(name)
        assert pod is not None
        return pod

    def scrape(self, **waiting: float) -> None:
        for name, requests in waiting.items():
            self[name].apply_scrape(ScrapeResult(Gauges(waiting=requests), b""))
        self.fleet.invalidate_scores()

    def send(self, prompt: bytes = LONG, *, now: float = 100.0) -> SchedulingResult:
        """The choice for a request; its prompt then counts as placed."""
        request = InferenceRequest("m", prompt)
        context = ChoiceContext(request, self.fleet.prefixes, now=now)
        result = self._scheduler.schedule(context, "m", None, now)
        for pod in (result.decode[0], *result.prefill[:1]):
            self.fleet.prefixes.place(pod, request.chain)
        return result


def decoded(setup: Setup, *prompts: bytes) -> list[str]:
    return [setup.send(prompt).decode[0].name for prompt in prompts]


def test_every_file_that_llm_d_ships_is_here() -> None:
    assert len(NAMES) == 19
    assert len(LOADED) == 14


@pytest.mark.parametrize("name", LOADED)
def test_it_loads_and_serves(name: str) -> None:
    setup = Setup(name, prefill="prefill", decode="decode")
    assert setup.send().decode[0].name == "decode"


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_with_line_plugin_and_the_nearest_one(name: str) -> None:
    line, message = REFUSED[name]
    with pytest.raises(DocumentError) as error:
        Setup(name)
    assert f"{name}.yaml:{line}: plugins[" in str(error.value)
    assert str(error.value).endswith(message)


@pytest.mark.parametrize("name", SPLIT)
def test_a_handler_with_a_decider_splits_by_itself(name: str) -> None:
    setup = Setup(name, prefill="prefill", decode="decode")
    first = setup.send()
    assert first.decision.path is RoutingPath.PREFILL_THEN_DECODE
    assert [pod.name for pod in first.prefill] == ["prefill"]
    short = setup.send(b"x" * 4 * 15)
    assert (short.decision.path, short.decision.reason) == (RoutingPath.UNIFIED, "short_prompt")
    without = Setup(name, decode="decode", other="decode").send()
    assert (without.decision.path, len(without.prefill)) == (RoutingPath.UNIFIED, 0)


@pytest.mark.parametrize("name", [name for name in LOADED if name not in SPLIT])
def test_nothing_else_splits(name: str) -> None:
    reason = Setup(name, prefill="prefill", decode="decode").send().decision.reason
    assert reason == "split_off"


def test_the_file_may_say_that_nothing_is_split(tmp_path: Path) -> None:
    text = (CONFIGS / "pd-epp-config.yaml").read_text()
    for section, enabled in (
        ("{enabled: false}", False),
        ("{enabled: true}", True),
        ("{fallback_to_unified: false}", True),
    ):
        file = tmp_path / "config.yaml"
        file.write_text(f"{text}\ndisaggregated_serving: {section}\n")
        assert load(file, {}, lists_backends=False).routing.serving.enabled is enabled


def test_prefill_pods_on_the_host_of_the_decode_pod_come_first() -> None:
    hosts = {"d": "h2", "p1": "h1", "p2": "h2"}
    near = Setup("pd-topology-epp-config", hosts, p1="prefill", p2="prefill", d="decode")
    near.scrape(p1=0, p2=50)
    assert [pod.name for pod in near.send().prefill] == ["p2"]
    far = Setup("pd-topology-epp-config", p1="prefill", p2="prefill", d="decode")
    far.scrape(p1=0, p2=50)
    assert far.send().prefill[0].name == "p1", "none is near: the queue decides"


@pytest.mark.parametrize(
    "name", ["dp-epp-config", "epp-config", "sim-epp-config", "sim-epp-kvcache-config"]
)
def test_a_prompt_returns_to_its_pod(name: str) -> None:
    setup = Setup(name, a="decode", b="decode", c="decode")
    first = decoded(setup, LONG)
    assert decoded(setup, *[LONG] * 8) == first * 8


def test_prefix_and_queue_weigh_alike() -> None:
    setup = Setup("epp-estimate-prefix-cache-config", a="decode", b="decode")
    (first,) = decoded(setup, LONG)
    setup.scrape(**{first: 120.0})
    # A whole match is worth 1, an empty queue at most 0.5.
    assert decoded(setup, LONG) == [first]
    assert decoded(setup, b"y" * 4 * 64) != [first]


def test_bursts_stay_together_and_only_within_the_window() -> None:
    setup = Setup("epp-burst-prefix-cache-config", a="decode", b="decode", c="decode")
    (first,) = decoded(setup, LONG)
    setup.scrape(**{first: 1.0})
    assert decoded(setup, *[LONG] * 8) == [first] * 8
    assert setup.send(now=101.0).decode[0].name != first, "the queue decides in the next window"


def test_prompts_that_no_pod_has_cached_go_to_each_in_turn() -> None:
    setup = Setup("sim-epp-no-hit-lru", a="decode", b="decode", c="decode")
    prompts = [bytes([64 + i]) * 4 * 64 for i in range(6)]
    names = decoded(setup, *prompts)
    assert sorted(names[:3]) == ["a", "b", "c"]
    assert names[3:] == names[:3]
    assert decoded(setup, *prompts[:3]) == names[:3]


def test_events_are_followed_with_the_files_tokenizer() -> None:
    for name, url in (
        ("epp-precise-prefix-cache-config", "http://render:8000"),
        ("sim-epp-tokenizer-vllm-http-config", "http://localhost:8000"),
        ("sim-epp-no-hit-lru", ""),
    ):
        scheduling = Setup(name).scheduling
        assert scheduling.events is not None
        assert [each.url for each in scheduling.tokenizers] == ([url] if url else [])


def test_flow_control_is_that_of_the_file(caplog: pytest.LogCaptureFixture) -> None:
    file = CONFIGS / "sim-program-aware-config.yaml"
    with caplog.at_level(logging.WARNING):
        log_notices(load(file, {}, lists_backends=False))
    assert not caplog.messages
    flow = Setup("sim-program-aware-config").scheduling.flow
    assert flow is not None
    assert flow.default.fairness == "tokens"
    flow = Setup("soft-reflective-ceiling-epp-config").scheduling.flow
    assert flow is not None
    assert flow.ceilings == SoftCeilings()


def check(file: Path) -> tuple[int, list[str], str]:
    result = CliRunner().invoke(main, ["--check-config", str(file)])
    return result.exit_code, result.stdout.splitlines(), result.stderr


DEFAULT_CHECKS = (
    "health checks: the metrics page, every 2s, timeout 2s; unhealthy after 3 failed, healthy "
    "after 1 passed"
)


def test_check_config_prints_the_health_checks(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "backends: [{name: a, url: 'http://10.0.0.1:8000'}]\n"
        "health_checks: {path: /health, interval: 500ms, timeout: 1s, unhealthy_threshold: 5}\n"
    )
    assert check(file)[1][-1] == (
        "health checks: /health, then the metrics page, every 500ms, timeout 1s; unhealthy after 5 "
        "failed, healthy after 1 passed"
    )


def test_check_config_prints_what_would_run() -> None:
    status, lines, _ = check(CONFIGS / "pd-topology-epp-config.yaml")
    assert status == 0
    assert lines == [
        "decode profile: decode",
        "  filters: decode-filter",
        "  scorers: queue-scorer x 1, prefix-cache-scorer x 2",
        "  picker: max-score-picker",
        "prefill profile: prefill",
        "  filters: prefill-filter, topology-affinity-filter",
        "  scorers: queue-scorer x 1, prefix-cache-scorer x 2, topology-affinity-scorer x 1",
        "  picker: max-score-picker",
        "handler: disagg-profile-handler",
        "decider: prefix-based-pd-decider",
        "splitting: from 16 uncached prompt tokens on",
        "prefix index: 31250 blocks of 16 tokens per pod, where its metrics do not tell",
        DEFAULT_CHECKS,
    ]


def test_check_config_prints_what_has_no_effect_and_why() -> None:
    file = CONFIGS / "sim-epp-kvcache-config.yaml"
    status, lines, _ = check(file)
    assert status == 0
    assert lines[4:] == [
        "handler: none",
        "decider: none",
        "splitting: off, each request is served by one pod",
        "prefix index: 31250 blocks of 16 tokens per pod, where its metrics do not tell",
        "KV events: port 5557 of every pod, replay from 5657",
        "tokenizer: http://render:8000",
        DEFAULT_CHECKS,
        "",
        f"{file}:7: zmqEndpoint has no effect: the EPP connects to port 5557 of every pod: let the "
        "engines publish there, with --kv-events-config endpoint tcp://*:5557",
        f"{file}:16: single-profile-handler is not needed: one profile serves both phases if only "
        "one is listed",
    ]


@pytest.mark.parametrize("name", LOADED)
def test_check_config_says_the_same_of_a_file_in_version_1(name: str, tmp_path: Path) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text()
    newer = text.replace("inference.networking.x-k8s.io/v1alpha1", "llm-d.ai/v1").replace(
        "llm-d.ai/v1alpha1", "llm-d.ai/v1"
    )
    assert "v1alpha1" not in newer
    file, said = tmp_path / "config.yaml", []
    for each in (text, newer):
        file.write_text(each)
        result = CliRunner().invoke(main, ["--check-config", str(file)])
        said.append((result.exit_code, result.output))
    assert said[0] == said[1]
    assert said[0][0] == 0


def test_check_config_of_an_invalid_file_ends_with_its_line(tmp_path: Path) -> None:
    file = CONFIGS / "sim-epp-gpu-config.yaml"
    status, lines, error = check(file)
    assert (status, lines) == (2, [])
    assert f"{file}:8: plugins[1].type: 'dcgm-data-source' is not supported" in error
    assert check(tmp_path / "none.yaml")[0] == 2


def test_check_config_takes_files_with_backends_and_without_plugins(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(
        "backends: [{name: a, url: 'http://10.0.0.1:8000', labels: {tier: a}}]\n"
        "disaggregated_serving: {enabled: true, fallback_to_unified: false}\n"
        "slo: {m: {ttft: 2s, itl: 50ms}, n: {itl: 20ms, attainment: 0.99}}\n"
    )
    assert check(file)[1][:5] == [
        "choice: predicted-cost",
        "splitting: by the cost",
        "objectives of m: TTFT 2s, ITL 50ms, for 0.9 of the requests",
        "objectives of n: ITL 20ms, for 0.99 of the requests",
        "fallback: none, a request that cannot be split is refused",
    ]


SESSIONS = """
plugins:
- type: session-affinity-scorer
- {type: session-affinity-filter, name: pinned, parameters: {
    profileName: prefill, encodedEndpointHeaderConfig: {header: X-Session-Prefill}}}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: session-affinity-scorer}]}
- {name: prefill, plugins: [{pluginRef: pinned}]}
"""


def test_sessions_of_both_phases(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(SESSIONS)
    routing = load(file, {}, lists_backends=False).routing
    headers = [session.header for session in routing.scheduling.added_headers]
    assert headers == ["x-session-token", "x-session-prefill"]
    assert check(file)[1][-2:] == [f"session token: header {header}" for header in headers]
    setup = Setup("pd-epp-config", p1="prefill", p2="prefill", d1="decode", d2="decode")
    scheduler = Scheduler(setup.fleet, routing, Random(7))
    for decode, prefill in (("d1", "p2"), ("d2", "p1")):
        tokens = [b64encode(name.encode()).decode() for name in (decode, prefill)]
        context = ChoiceContext(
            InferenceRequest("m", LONG), headers=dict(zip(headers, tokens, strict=True))
        )
        result = scheduler.schedule(context, "m", None, 1.0)
        assert [pod.name for pod in result.decode] == [decode]
        assert [pod.name for pod in result.prefill] == [prefill]
