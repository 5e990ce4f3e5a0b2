"""The cached share of a pod's prompts, from the counters of engines as vLLM counts."""

from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.pod_reports import HitReport, Reporter
from tandem_epp.estimates.engine_figures import EngineCounters
from tandem_epp.estimates.prompt_hits import HandOver, PromptHits

STARTED = EngineCounters(prompt_tokens=0.0, computed_tokens=0.0)
"""The counters of a fresh process."""


@dataclass
class FakeEngine:
    """Counts prompts as vLLM does when they get their first token, and is scraped into `hits`."""

    hits: PromptHits
    receives_kv: bool = False
    counters: EngineCounters = STARTED

    def serve(self, prompt: float, cached: float, external: float = 0.0) -> None:
        counters = self.counters
        self.counters = replace(
            counters,
            prompt_tokens=(counters.prompt_tokens or 0.0) + prompt,
            computed_tokens=(counters.computed_tokens or 0.0) + prompt - cached - external,
            external_tokens=(counters.external_tokens or 0.0) + external,
        )

    def hand_over(self, prompt: float, cached: float = 0.0, *, last_token: int = 0) -> HandOver:
        """Another engine computes the prompt, of which this one caches some."""
        handed = self.hits.hand_over(prompt)
        self.serve(prompt, cached, prompt - cached - last_token)
        return handed

    def scrape(self) -> None:
        self.hits.on_counters(self.counters, receives_kv=self.receives_kv)


def measured(hits: PromptHits) -> tuple[float, float]:
    reporter, tokens = hits.measured
    assert reporter is Reporter.ENGINE
    return tokens.prompt, tokens.cached


def test_every_prompt_of_the_engine_is_measured() -> None:
    hits = PromptHits()
    engine = FakeEngine(hits)
    engine.serve(5000, 5000)
    engine.scrape()
    engine.serve(1000, 0)
    engine.serve(1000, 960)
    engine.scrape()
    assert measured(hits) == (2000, 960), "what was counted before the EPP came is left out"
    # The same requests, by the usage of their answers.
    hits.on_answer(1000, 0)
    hits.on_answer(1000, 960)
    assert measured(hits) == (2000, 960), "no request counts twice"
    report = hits.measured[1].report(Reporter.ENGINE)
    assert report == HitReport(0.48, 2000, Reporter.ENGINE)


def test_a_cache_outside_the_engine_is_a_cache() -> None:
    hits = PromptHits()
    engine = FakeEngine(hits)
    engine.scrape()
    engine.serve(1000, 300, external=200)
    engine.scrape()
    assert measured(hits) == (1000, 500)


@pytest.mark.parametrize("last_token", [0, 1], ids=["vLLM", "the last token is computed again"])
def test_a_prompt_that_was_handed_over_counts_where_it_was_computed(last_token: int) -> None:
    hits = PromptHits()
    engine = FakeEngine(hits, receives_kv=True)
    engine.scrape()
    for i in range(200):
        engine.hand_over(1000, 400, last_token=last_token).settle(1000)
        if i % 10 == 0:
            engine.serve(500, 400)
            engine.scrape()
    engine.scrape()
    prompt, cached = measured(hits)
    assert prompt == 20 * 500
    assert cached == pytest.approx(20 * 400, abs=200 * last_token)


def test_a_hand_over_is_left_out_whenever_its_response_passes() -> None:
    hits = PromptHits()
    engine = FakeEngine(hits, receives_kv=True)
    engine.scrape()
    early = hits.hand_over(1000)
    engine.serve(500, 100)
    engine.scrape()
    assert measured(hits) == (0, 0), "own prompts may count late"
    engine.serve(1000, 400, external=600)
    engine.scrape()
    assert measured(hits) == (0, 0)
    # The answer is no stream: its headers come when all of it is generated.
    early.settle(1000)
    for _ in range(3):
        engine.scrape()
        assert measured(hits) == (500, 100)
    engine.serve(500, 100)
    engine.scrape()
    assert measured(hits) == (1000, 200)


def test_the_prediction_of_a_length_is_corrected() -> None:
    hits = PromptHits()
    engine = FakeEngine(hits, receives_kv=True)
    engine.scrape()
    for predicted in (800, 1250):
        handed = hits.hand_over(predicted)
        engine.serve(1000, 0, external=1000)
        handed.settle(1000)
        engine.serve(500, 100)
        engine.scrape()
    assert measured(hits) == (1000, 200)


def test_a_prompt_that_was_not_handed_over_after_all_counts_here() -> None:
    hits = PromptHits()
    engine = FakeEngine(hits, receives_kv=True)
    engine.scrape()
    handed = hits.hand_over(1000)
    engine.serve(1000, 300)
    engine.scrape()
    assert measured(hits) == (0, 0)
    handed.settle(0)
    handed.settle(0)
    engine.scrape()
    assert measured(hits) == (1000, 300)


def test_a_hand_over_that_the_engine_never_got_is_forgotten_at_rest() -> None:
    hits = PromptHits()
    engine = FakeEngine(hits, receives_kv=True)
    engine.scrape()
    hits.hand_over(1000).settle(1000)
    for _ in range(2):
        engine.scrape()
    engine.serve(500, 100)
    engine.scrape()
    assert measured(hits) == (500, 100)


def test_a_hand_over_without_a_response_counts_as_what_was_transferred() -> None:
    hits = PromptHits()
    engine = FakeEngine(hits, receives_kv=True)
    engine.scrape()
    engine.hand_over(1000).settle(0)
    engine.serve(500, 100)
    engine.scrape()
    assert measured(hits) == (500, 100)


def test_hand_offs_of_an_unknown_router_count_as_what_was_transferred() -> None:
    hits = PromptHits()
    engine = FakeEngine(hits, receives_kv=True)
    engine.scrape()
    engine.serve(1000, 0, external=1000)
    engine.serve(500, 100)
    engine.scrape()
    assert measured(hits) == (500, 100)


def test_a_restart_loses_and_invents_nothing() -> None:
    hits = PromptHits()
    engine = FakeEngine(hits, receives_kv=True)
    engine.scrape()
    engine.serve(500, 100)
    engine.scrape()
    handed = [hits.hand_over(1000) for _ in range(3)]
    # The engine dies before a page has the prompts that were handed over.
    hits.restart()
    for each, prompt in zip(handed, (1000, 0, 500), strict=True):
        each.settle(prompt)
    engine.counters = STARTED
    engine.serve(300, 200)
    engine.scrape()
    assert measured(hits) == (800, 300)


def test_answers_measure_an_engine_without_such_counters() -> None:
    hits = PromptHits()
    hits.on_counters(EngineCounters(prefills=3.0), receives_kv=False)
    assert hits.measured[1].report(hits.measured[0]) is None
    hits.on_answer(100, 400)
    reporter, tokens = hits.measured
    assert (reporter, tokens.prompt, tokens.cached) == (Reporter.ANSWERS, 100, 100)


def test_the_shown_ratio_is_that_of_the_latest_tokens() -> None:
    hits = PromptHits()
    for cached in (0, 100_000):
        for _ in range(50):
            hits.estimated.add(100_000, cached)
    report = hits.estimated.report(Reporter.EPP)
    assert report is not None
    assert report.ratio > 0.95
    assert report.prompt_tokens <= 1e6
    assert hits.estimated.cached / hits.estimated.prompt == 0.5


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["scrape", "hand over", "settle", "own", "unknown router"]),
            st.integers(1, 1000),
            st.integers(0, 1000),
        ),
        max_size=40,
    )
)
def test_metrics_never_fall_and_no_more_is_cached_than_was_asked(
    events: list[tuple[str, int, int]],
) -> None:
    hits = PromptHits()
    engine = FakeEngine(hits, receives_kv=True)
    engine.scrape()
    under_way = []
    before = (0.0, 0.0)
    for kind, prompt, part in events:
        cached = min(prompt, part)
        match kind:
            case "hand over":
                under_way.append(hits.hand_over(part))
                engine.serve(prompt, cached, external=prompt - cached)
            case "settle" if under_way:
                under_way.pop().settle((0, prompt)[part % 2])
            case "own":
                engine.serve(prompt, cached)
            case "unknown router":
                engine.serve(prompt, cached, external=prompt - cached)
            case _:
                engine.scrape()
        after = measured(hits)
        assert after[0] >= before[0]
        assert after[1] >= before[1]
        assert after[1] <= after[0]
        before = after
