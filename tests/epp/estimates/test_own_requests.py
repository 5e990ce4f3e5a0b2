"""Own requests set against the engine's counters: exact durations, and what legs have beyond."""

from dataclasses import dataclass, field

import pytest

from tandem_epp.estimates.engine_figures import EngineCounters
from tandem_epp.estimates.own_requests import EndedRequest, OwnRequests
from tandem_planner.prefill_fit import PrefillSample, prefill_sample

OVERHEAD = 0.02


@dataclass
class CountingEngine:
    """An engine that this EPP and others use."""

    own: OwnRequests = field(default_factory=OwnRequests)
    seconds: float = 100.0
    queued: float = 7.0
    prefills: float = 50.0
    decoding: float | None = 30.0
    tokens: float = 9000.0

    def __post_init__(self) -> None:
        self.own.advance(self.page, is_idle=True)

    @property
    def page(self) -> EngineCounters:
        return EngineCounters(
            prefill_seconds=self.seconds,
            prefills=self.prefills,
            prefill_tokens=self.tokens,
            queue_seconds=self.queued,
            decode_seconds=self.decoding,
        )

    def count(self, seconds: float, tokens: float, queue: float = 0.0) -> None:
        """A request ended."""
        self.seconds += seconds
        self.queued += queue
        self.prefills += 1
        self.tokens += tokens

    def serve(self, tokens: float, seconds: float, queue: float = 0.0) -> None:
        """A request of this EPP, from its start to its end."""
        self.own.begin()
        self.count(seconds, tokens, queue)
        self.own.end(EndedRequest(tokens, 0.0, seconds + queue + OVERHEAD))

    def scrape(self, *, is_idle: bool = True) -> PrefillSample | None:
        return self.own.advance(self.page, is_idle=is_idle)


def test_requests_one_after_the_other_tell_the_engines_own_seconds() -> None:
    engine = CountingEngine()
    engine.serve(1000, 0.1)
    engine.serve(3000, 0.4, queue=0.3)
    sample = engine.scrape()
    assert sample is not None
    assert sample == prefill_sample([(1000, 0), (3000, 0)], sample.seconds)
    assert sample.seconds == pytest.approx(0.5)
    assert engine.own.overhead == pytest.approx(OVERHEAD)
    assert engine.scrape() is None


def test_overlapping_requests_tell_only_what_legs_have_beyond() -> None:
    engine = CountingEngine()
    engine.own.begin()
    engine.serve(1000, 0.1)
    engine.count(0.3, 2000)
    engine.own.end(EndedRequest(2000, 0.0, 0.3 + OVERHEAD))
    assert engine.scrape() is None
    assert engine.own.overhead == pytest.approx(OVERHEAD)
    assert engine.scrape() is None
    engine.own.begin()
    engine.serve(1000, 0.1)
    assert engine.scrape() is not None, "one alone, beside another that goes on"


def test_requests_of_others_tell_nothing_until_the_engine_is_idle() -> None:
    engine = CountingEngine()
    engine.count(5.0, 100)
    engine.serve(1000, 0.1)
    assert engine.scrape(is_idle=False) is None
    assert engine.scrape(is_idle=True) is None
    assert engine.own.overhead is None
    engine.serve(1000, 0.1)
    assert engine.scrape() == PrefillSample(1, 1000, 1e6, pytest.approx(0.1))


def test_an_end_that_only_one_side_has_counted_is_waited_for() -> None:
    engine = CountingEngine()
    engine.own.begin()
    engine.count(0.1, 1000)
    assert engine.scrape(is_idle=True) is None, "its answer is still under way"
    engine.own.end(EndedRequest(1000, 0.0, None))
    assert engine.scrape() is not None
    assert engine.own.overhead is None


def whole(decoding: float, seconds: float = 0.1) -> EndedRequest:
    """A request whose answer came as a whole, `decoding` seconds after its first token."""
    return EndedRequest(1000, 0.0, seconds + decoding + OVERHEAD, decodes=True)


def test_the_engines_decoding_is_no_overhead_of_answers_that_come_as_a_whole() -> None:
    engine = CountingEngine()
    assert engine.decoding is not None
    for decoding in (2.0, 3.0):
        engine.own.begin()
        engine.count(0.1, 1000)
        engine.decoding += decoding
        engine.own.end(whole(decoding))
    assert engine.scrape() is not None
    assert engine.own.overhead == pytest.approx(OVERHEAD)


def test_whole_answers_tell_no_overhead_where_decoding_is_not_counted_for_them_alone() -> None:
    uncounted = CountingEngine(decoding=None)
    mixed = CountingEngine()
    mixed.serve(1000, 0.1)
    for engine in (uncounted, mixed):
        engine.own.begin()
        engine.count(0.1, 1000)
        engine.own.end(whole(2.0))
        assert engine.scrape() is not None
        assert engine.own.overhead is None


def test_many_requests_of_others_end_the_batch() -> None:
    engine = CountingEngine()
    for _ in range(40):
        engine.count(5.0, 100)
    assert engine.scrape(is_idle=False) is None
    engine.serve(1000, 0.1)
    assert engine.scrape(is_idle=False) is not None


def test_requests_that_the_engine_did_not_compute_void_their_batch() -> None:
    engine = CountingEngine()
    engine.own.begin()
    engine.count(0.001, 1)
    engine.own.end(None)
    engine.serve(1000, 0.1)
    assert (engine.scrape(), engine.own.overhead) == (None, None)
    engine.own.begin()
    engine.own.drop()
    engine.serve(1000, 0.1)
    assert engine.scrape() is not None


def test_a_hit_that_only_the_engine_knew_counts_as_cached() -> None:
    engine = CountingEngine()
    engine.own.begin()
    engine.count(0.1, 500)
    engine.own.end(EndedRequest(2000, 0.0))
    assert engine.scrape() == PrefillSample(1, 500, 500 * (500 + 2 * 1500), pytest.approx(0.1))


def test_the_epps_own_count_of_a_texts_tokens_stays() -> None:
    engine = CountingEngine()
    engine.own.begin()
    engine.count(0.1, 900)
    engine.own.end(EndedRequest(1000, 0.0))
    assert engine.scrape() == PrefillSample(1, 1000, 1e6, pytest.approx(0.1))


def test_the_usual_overhead_counts_and_none_is_negative() -> None:
    engine = CountingEngine()
    for _ in range(5):
        engine.serve(1000, 0.1)
        engine.scrape()
    engine.own.begin()
    engine.count(0.1, 1000)
    engine.own.end(EndedRequest(1000, 0.0, 9.0))
    engine.scrape()
    assert engine.own.overhead == pytest.approx(OVERHEAD)
    other = CountingEngine()
    other.own.begin()
    other.count(0.1, 1000)
    other.own.end(EndedRequest(1000, 0.0, 0.05))
    other.scrape()
    assert other.own.overhead == 0.0


def test_a_restarted_engine_counts_from_0() -> None:
    engine = CountingEngine()
    engine.serve(1000, 0.1)
    engine.scrape()
    engine.own.restart()
    engine.seconds = engine.queued = engine.prefills = engine.tokens = 0.0
    assert (engine.scrape(), engine.own.overhead) == (None, None)
    engine.serve(1000, 0.2)
    assert engine.scrape() == PrefillSample(1, 1000, 1e6, pytest.approx(0.2))
