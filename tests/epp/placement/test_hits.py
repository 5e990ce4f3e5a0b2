"""The cached share of prompts, predicted and measured, from placements, responses and scrapes."""

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tandem_contract.timing import Timing
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.pods import Pod
from tandem_epp.estimates.engine_figures import EngineCounters, Gauges
from tandem_epp.exchange import ResponseHeaders

from ..replicas.test_shared_fleet import Replicas
from .test_picker import LONG, NOW, PickerSetup

SPLIT = "plugins: [{type: active-request-scorer}, {type: always-disagg-pd-decider}]"
STARTED = EngineCounters(prompt_tokens=0.0, computed_tokens=0.0, external_tokens=0.0)


def scrape(pod: Pod, prompt: float, computed: float, external: float = 0.0) -> None:
    """A page on which the engine counts one more prompt than on the page before."""
    before = pod.counters if pod.counters.prompt_tokens is not None else STARTED
    if pod.counters.prompt_tokens is None:
        pod.apply_scrape(ScrapeResult(Gauges(), b"", counters=before), NOW)
    after = replace(
        before,
        prompt_tokens=(before.prompt_tokens or 0.0) + prompt,
        computed_tokens=(before.computed_tokens or 0.0) + computed,
        external_tokens=(before.external_tokens or 0.0) + external,
    )
    pod.apply_scrape(ScrapeResult(Gauges(), b"", counters=after), NOW)


def tokens(setup: PickerSetup, source: str) -> Mapping[str, tuple[float, float]]:
    """Backend → tokens of prompts and of these the cached ones, of all backends with any."""
    sums: dict[str, list[float]] = {}
    for metric in setup.metrics.registry.collect():
        for sample in metric.samples:
            place = {
                "tandem_epp_prompt_tokens_total": 0,
                "tandem_epp_cached_prompt_tokens_total": 1,
            }.get(sample.name)
            if place is not None and sample.labels["source"] == source:
                sums.setdefault(sample.labels["backend"], [0.0, 0.0])[place] += sample.value
    return {name: (prompt, cached) for name, (prompt, cached) in sums.items() if prompt}


@pytest.mark.parametrize("has_sidecar", [False, True])
def test_streams_of_one_engine_are_measured_by_its_counters(has_sidecar: bool) -> None:
    setup = PickerSetup(enabled=False, u="unified")
    scrape(setup["u"], 0, 0)
    for computed in (600, 40):
        placement, _ = setup.place(stream=True)
        # A sidecar does not know the usage of a stream when it sends the headers.
        timing = Timing(leg=0.5).encode() if has_sidecar else None
        path = "unified" if has_sidecar else None
        response = ResponseHeaders(timing, 200, path=path, is_stream=True)
        placement.on_response_headers(response, NOW)
        scrape(setup["u"], 600, computed)
        placement.end(NOW)
    assert tokens(setup, "measured") == {"u": (1200, 560)}
    [(prompt, cached)] = tokens(setup, "estimated").values()
    assert 0 < cached < prompt


def test_a_split_request_is_counted_on_the_pod_that_computes_it() -> None:
    setup = PickerSetup(SPLIT, d="decode", p="prefill")
    for name in "dp":
        scrape(setup[name], 0, 0)
    for computed in (600, 40):
        placement, _ = setup.place()
        scrape(setup["p"], 600, computed)
        scrape(setup["d"], 600, 0, external=200)
        timing = Timing(leg=0.5, cached=600 - computed, computed=computed, prompt=600).encode()
        placement.on_response_headers(ResponseHeaders(timing, 200, "p"), NOW)
        placement.end(NOW)
        scrape(setup["d"], 0, 0)
    assert tokens(setup, "measured") == {"p": (1200, 560)}
    assert list(tokens(setup, "estimated")) == ["p"]


def test_a_fallback_is_counted_on_the_decode_pod() -> None:
    setup = PickerSetup(SPLIT, d="decode", p="prefill")
    for name in "dp":
        scrape(setup[name], 0, 0)
    placement, _ = setup.place()
    scrape(setup["d"], 600, 400)
    placement.on_response_headers(ResponseHeaders(Timing(leg=0.5).encode(), 200, None), NOW)
    scrape(setup["d"], 0, 0)
    placement.end(NOW)
    assert tokens(setup, "measured") == {"d": (600, 200)}
    assert tokens(setup, "estimated") == {}, "no prediction was made for this pod"


@pytest.mark.parametrize("status", [None, 200, 500])
def test_a_hand_off_that_ends_early_leaves_no_trace(status: int | None) -> None:
    setup = PickerSetup(SPLIT, d="decode", p="prefill")
    scrape(setup["d"], 0, 0)
    placement, _ = setup.place()
    if status is not None:
        response = ResponseHeaders("-", status, "p" if status == 200 else None)
        placement.on_response_headers(response, NOW)
        placement.on_response_headers(response, NOW)
        scrape(setup["d"], 600 if status == 200 else 0, 0)
    placement.end(NOW)
    for _ in range(3):
        scrape(setup["d"], 0, 0)
    scrape(setup["d"], len(LONG), 100)
    assert tokens(setup, "measured")["d"][0] == pytest.approx(len(LONG), abs=100)


def test_a_client_that_leaves_before_the_answer_takes_nothing_from_a_busy_pod() -> None:
    setup = PickerSetup(SPLIT, d="decode", p="prefill")
    scrape(setup["d"], 0, 0)
    for _ in range(10):
        placement, _ = setup.place()
        scrape(setup["d"], 1000, 400)
        placement.end(NOW)
        scrape(setup["d"], 1000, 400)
    assert tokens(setup, "measured") == {"d": (20_000, 12_000)}


@pytest.mark.parametrize("snapshots", [0, 1, 5])
@pytest.mark.parametrize("is_answered_first", [False, True])
def test_a_snapshot_hands_no_prompt_over_again(snapshots: int, *, is_answered_first: bool) -> None:
    replicas = Replicas(d="decode", p="prefill")
    here, there = replicas.setups
    pod = there["d"]
    scrape(pod, 0, 0)
    placement, _ = here.place(LONG)
    prompt = placement.pods.size.prompt
    replicas.mesh.advance(1.0)
    for is_answered in (False, True):
        if is_answered:
            timing = Timing(cached=0, computed=prompt, prompt=prompt).encode()
            placement.on_response_headers(ResponseHeaders(timing, 200, "p"), NOW)
            replicas.mesh.advance(2.0)
        if is_answered == is_answered_first:
            for _ in range(snapshots):
                replicas.shared[1].reset("0")
                for event in replicas.shared[0].snapshot():
                    replicas.shared[1].apply("0", event)
    # Of the prompt that was handed over, the decode pod had some.
    scrape(pod, prompt, 0, external=prompt - 100)
    for _ in range(10):
        scrape(pod, 1000, 400)
    assert tokens(there, "measured")["d"] == (10_000, 6000)


def test_a_replica_counts_the_answers_of_an_engine_without_counters() -> None:
    setup = PickerSetup(enabled=False, u="unified")
    setup["u"].apply_scrape(ScrapeResult(Gauges(), b""), NOW)
    placement, _ = setup.place()
    timing = Timing(leg=0.5, prompt=600, cached=150).encode()
    placement.on_response_headers(ResponseHeaders(timing, 200), NOW)
    placement.on_response_headers(ResponseHeaders(timing, 200), NOW)
    placement.end(NOW)
    assert tokens(setup, "measured") == {"u": (600, 150)}
    name, labels = "tandem_epp_prompt_tokens_total", {"backend": "u", "source": "measured"}
    sample = setup.metrics.registry.get_sample_value
    assert sample(name, labels | {"reported_by": "answers"}) == 600
    scrape(setup["u"], 100, 100)
    assert sample(name, labels | {"reported_by": "engine"}) == 100
    assert sample(name, labels | {"reported_by": "answers"}) is None
