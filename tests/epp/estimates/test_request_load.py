"""A request on the estimates of its pods: counted exactly, and learned from by the best source."""

from itertools import permutations

import pytest
from msgspec.structs import replace

from tandem_contract.fabric_classes import FabricClass
from tandem_contract.timing import UNKNOWN, Timing, parse_timing
from tandem_epp.estimates.engine_figures import EngineCounters, Gauges
from tandem_epp.estimates.kinds import MIN_SAMPLES, STALE_SECONDS, fill_in
from tandem_epp.estimates.pod_estimates import OUTPUT_PRIOR, PodEstimates
from tandem_epp.estimates.request_load import PlacedPrompt, RequestLoad
from tandem_planner.cost import (
    LATE_SHARE,
    SHORT_ANSWER,
    STREAMED_SHARE,
    wait_seconds,
)
from tandem_planner.objective import (
    ITL_WEIGHT,
    LOST_SHARE,
    NO_OBJECTIVE,
    Objective,
    make_objective,
)
from tandem_planner.prefill_fit import PREFILL_PRIOR, prefill_sample

NODE, DOMAIN, ELSEWHERE = FabricClass
SIZE = PlacedPrompt(prompt=2000, cached=1000, cached_on_decode=500, output=100.0, is_stream=True)
PREFILL_SECONDS = PREFILL_PRIOR.seconds(1000, 1000)


def learn(pod: PodEstimates, timing: Timing, *, seconds: float, size: PlacedPrompt = SIZE) -> None:
    """Two requests, one after the other: the first one, of a cold engine, counts no more."""
    for now in (10.0, 20.0):
        load = RequestLoad(pod, None, size, now)
        load.on_response(now + seconds, timing)
        load.end(now + seconds)


def test_a_request_waits_behind_the_one_before_it() -> None:
    pod = PodEstimates()
    load = RequestLoad(pod, None, SIZE, 10.0)
    assert wait_seconds(pod.figures(10.0), 10.0) == pytest.approx(PREFILL_SECONDS)
    late = wait_seconds(pod.figures(10.0), 10.0 + PREFILL_SECONDS + 1.0)
    assert late == pytest.approx(LATE_SHARE)
    load.on_response(10.5, Timing(leg=0.5))
    figures = pod.figures(10.5)
    assert (wait_seconds(figures, 10.5), pod.decodes) == (0.0, 1)
    assert figures.itl_harm > 0
    load.end(11.0)
    assert (pod.decodes, pod.figures(11.0).itl_harm) == (0, 0.0)


def test_answers_are_delayed_also_before_they_begin_and_short_ones_more() -> None:
    pod, prefill = PodEstimates(), PodEstimates()
    RequestLoad(pod, None, replace(SIZE, output=1.0, limit=1), 10.0)
    assert pod.figures(10.0).stall == 0.0, "one token has no ITL"
    long = RequestLoad(pod, prefill, SIZE, 10.0)
    assert pod.figures(10.0).stall == pytest.approx(ITL_WEIGHT / SIZE.output)
    assert prefill.figures(10.0).stall == 0.0, "its answer runs elsewhere"
    short = RequestLoad(pod, None, replace(SIZE, output=2.0, limit=2), 10.0)
    long.on_response(11.0)
    both = ITL_WEIGHT * (1 / SIZE.output + 1 / SHORT_ANSWER)
    assert pod.figures(11.0).stall == pytest.approx(both)
    short.end(12.0)
    assert pod.figures(12.0).stall == pytest.approx(ITL_WEIGHT / SIZE.output)


def test_an_answer_that_misses_its_objective_is_delayed_at_less_harm() -> None:
    soon, late = make_objective(10.0, 0.05, 0.9), make_objective(PREFILL_SECONDS / 2, 0.05, 0.9)
    pod = PodEstimates()
    load = RequestLoad(pod, None, SIZE, 10.0, objective=soon)
    harm = pod.figures(10.0).stall
    load.on_response(30.0, Timing(leg=20.0))
    assert pod.figures(30.0).stall == pytest.approx(LOST_SHARE * harm, rel=0.2)
    load.end(40.0)
    assert pod.figures(40.0).stall == 0.0
    # Before the first token the prediction says it.
    other = PodEstimates()
    RequestLoad(other, None, SIZE, 10.0, objective=late)
    assert other.figures(10.0).stall < 0.5 * harm


def test_an_answer_is_delayed_at_more_harm_where_it_may_miss_its_itl() -> None:
    def harm(objective: Objective) -> float:
        pod = PodEstimates()
        RequestLoad(pod, None, SIZE, 10.0, objective=objective)
        return pod.figures(10.0).stall

    step = PodEstimates().best_decode.step
    assert harm(make_objective(10.0, 100 * step, 0.9)) == pytest.approx(harm(NO_OBJECTIVE))
    near = make_objective(10.0, step, 0.9)
    assert harm(near) == pytest.approx((ITL_WEIGHT + near.stall) / SIZE.output)
    # Of TTFT alone nothing is said on answers.
    assert harm(make_objective(10.0, None, 0.9)) == pytest.approx(harm(NO_OBJECTIVE))


def test_a_stream_without_a_report_begins_before_its_first_token() -> None:
    pod = PodEstimates()
    load = RequestLoad(pod, None, SIZE, 10.0)
    load.on_response(10.001)
    assert wait_seconds(pod.figures(10.001), 10.001) == pytest.approx(PREFILL_SECONDS - 0.001)
    assert pod.prefill.count == 0
    # Nothing tells when it is over: the prediction does.
    after = 10.001 + PREFILL_SECONDS
    assert wait_seconds(pod.figures(after), after) == 0.0
    load.end(20.0)
    assert (pod.decodes, pod.awaiting_prefill, len(pod.queue)) == (0, 0, 0)


@pytest.mark.parametrize("events", [*permutations(("response", "end", "move", "end"))])
def test_every_count_is_returned_once(events: tuple[str, ...]) -> None:
    decode, other, prefill = PodEstimates(), PodEstimates(), PodEstimates()
    load = RequestLoad(decode, prefill, SIZE, 0.0)
    assert (len(prefill.queue), len(decode.queue)) == (1, 0)
    # Without requests the stall is 0 whatever was counted.
    for pod in (decode, other):
        RequestLoad(pod, prefill, replace(SIZE, output=500.0, limit=500), 0.0)
    for event in events:
        match event:
            case "response":
                load.on_response(1.0)
            case "end":
                load.end(2.0)
            case "move":
                load.move_decode(other)
    assert [pod.decodes for pod in (decode, other, prefill)] == [0, 0, 0]
    assert [pod.awaiting_prefill for pod in (decode, other, prefill)] == [1, 1, 0]
    assert [len(pod.queue) for pod in (decode, other, prefill)] == [0, 0, 2]
    stalls = [pod.figures(2.0).stall for pod in (decode, other, prefill)]
    assert stalls == pytest.approx([ITL_WEIGHT / 500, ITL_WEIGHT / 500, 0.0])


@pytest.mark.parametrize(
    ("timing", "seconds", "expected"),
    [
        pytest.param(Timing(leg=2.0), 3.0, 2.0, id="the leg"),
        pytest.param(Timing(leg=2.0, queue=0.5, compute=1.0), 3.0, 1.0, id="the engine"),
    ],
)
def test_the_best_source_counts(timing: Timing, seconds: float, expected: float) -> None:
    pod = PodEstimates()
    learn(pod, timing, seconds=seconds)
    assert pod.prefill.count == 1
    assert pod.prefill.cost.seconds(1000, 1000) == pytest.approx(expected, rel=0.01)


def test_tokens_by_the_engine_replace_the_estimate() -> None:
    pod = PodEstimates()
    learn(pod, Timing(compute=1.0, cached=0, computed=500), seconds=2.0)
    assert pod.prefill.cost.seconds(500) == pytest.approx(1.0, rel=0.01)


def test_an_answer_that_is_no_stream_tells_nothing_by_itself() -> None:
    pod, size = PodEstimates(), PlacedPrompt(1000, 0, 0, 10.0, is_stream=False)
    learn(pod, UNKNOWN, seconds=5.0, size=size)
    assert pod.prefill.count == 0
    learn(pod, Timing(leg=3.0, generated=101), seconds=5.0, size=size)
    assert pod.prefill.cost.seconds(1000) == pytest.approx(
        3.0 - 100 * pod.decode.cost.step, rel=0.01
    )


def test_transfers_are_learned_on_the_decode_pod() -> None:
    decode, prefill = PodEstimates(), PodEstimates()
    load = RequestLoad(decode, prefill, SIZE, 0.0)
    load.on_response(1.0, Timing(transfer=0.5, bytes=1_500_000), prefill)
    assert decode.transfer.bytes_per_token == 1000.0
    assert decode.transfer.cost.seconds(1.5e6) == pytest.approx(0.5)


def test_a_reported_transfer_is_of_the_class_of_its_pair() -> None:
    decode, prefill, retried = PodEstimates(), PodEstimates(), PodEstimates()
    report = Timing(transfer=0.5, bytes=1_500_000)
    RequestLoad(decode, prefill, SIZE, 0.0, NODE).on_response(1.0, report)
    RequestLoad(decode, prefill, SIZE, 2.0, NODE).on_response(3.0, report, retried, ELSEWHERE)
    RequestLoad(decode, prefill, SIZE, 4.0).on_response(5.0, report, prefill)
    assert [decode.fabrics.fit(fabric).count for fabric in FabricClass] == [1, 0, 1]
    assert decode.transfer.count == 3


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        pytest.param((NODE,), [1, 0, 0], id="one class"),
        pytest.param((ELSEWHERE,), [0, 0, 0], id="two classes"),
        pytest.param((None,), [0, 0, 0], id="a class that is not known"),
    ],
)
def test_counted_transfers_are_of_a_class_if_all_that_were_placed_are(
    others: tuple[FabricClass | None, ...], expected: list[int]
) -> None:
    decode, prefill = PodEstimates(), PodEstimates()
    counters = EngineCounters(transfer_bytes=0.0, transfer_seconds=0.0, transfers=0.0)
    decode.on_counters(counters, Gauges(), None, 0.0)
    for fabric in (NODE, *others):
        load = RequestLoad(decode, prefill, SIZE, 0.5, fabric)
        load.on_response(0.7)
        load.end(0.9)
    counted = EngineCounters(transfer_bytes=2e9, transfer_seconds=0.2, transfers=2.0)
    decode.on_counters(counted, Gauges(), None, 1.0)
    assert [decode.fabrics.fit(fabric).count for fabric in FabricClass] == expected
    assert decode.transfer.count == 1


def test_a_retry_or_another_decode_pod_is_of_another_class() -> None:
    decode, other, prefill = PodEstimates(), PodEstimates(), PodEstimates()
    load = RequestLoad(decode, prefill, SIZE, 0.0, NODE)
    load.on_response(1.0, UNKNOWN, PodEstimates(), ELSEWHERE)
    assert decode.placed_transfers.take()[0] is None
    load = RequestLoad(decode, prefill, SIZE, 0.0, NODE)
    load.move_decode(other, ELSEWHERE)
    load.on_response(1.0, Timing(transfer=0.5, bytes=1_500_000))
    load.end(2.0)
    assert other.placed_transfers.take()[0] is ELSEWHERE
    assert [other.fabrics.fit(fabric).count for fabric in FabricClass] == [0, 0, 1]
    for pod in (decode, other):
        pod.placed_transfers.take()
        assert pod.placed_transfers.take()[0] is None, "nothing is under way"


def test_an_answer_that_tells_late_is_not_another_routers() -> None:
    pod = PodEstimates()
    RequestLoad(pod, None, SIZE, 10.0)
    late = 10.0 + 2 * PREFILL_SECONDS
    pod.figures(late)
    pod.on_counters(EngineCounters(), Gauges(running=1), None, late)
    assert pod.figures(late).stall == pytest.approx(ITL_WEIGHT / SIZE.output)


def test_a_prefill_leg_delays_no_answer() -> None:
    prefill = PodEstimates()
    prefill.serves_decode = False
    prefill.on_counters(EngineCounters(), Gauges(running=3), None, 1.0)
    assert prefill.figures(1.0).stall == 0.0


def test_requests_of_other_routers_are_seen_in_the_gauges() -> None:
    pod = PodEstimates()
    pod.on_counters(EngineCounters(), Gauges(running=4, waiting=3, deferred=1), None, 1.0)
    figures = pod.figures(1.0)
    assert figures.queued == pytest.approx(2 * PREFILL_PRIOR.seconds(1000))
    assert figures.stall == pytest.approx(ITL_WEIGHT * 4 / OUTPUT_PRIOR)


def test_free_memory_shrinks_with_what_was_placed_since_the_scrape() -> None:
    pod = PodEstimates()
    pod.on_counters(EngineCounters(), Gauges(kv_usage=0.25), 10_000.0, 1.0)
    assert pod.figures(1.0).free_tokens == 7500
    RequestLoad(pod, None, SIZE, 2.0)
    assert pod.figures(2.0).free_tokens == 7500 - 1000 - 100


def test_what_a_pod_loads_from_storage_takes_its_memory_too() -> None:
    decode, prefill = PodEstimates(), PodEstimates()
    for pod in (decode, prefill):
        pod.on_counters(EngineCounters(), Gauges(), 10_000.0, 1.0)
    size = PlacedPrompt(2000, 1500, 1500, 100.0, loaded=1000)
    RequestLoad(decode, None, size, 2.0)
    assert decode.figures(2.0).free_tokens == 10_000 - 500 - 1000 - 100
    RequestLoad(decode, prefill, size, 2.0)
    assert prefill.figures(2.0).free_tokens == 10_000 - 500 - 1000


def test_a_pod_without_samples_takes_over_the_figures_of_alike_pods() -> None:
    known, unknown, other = PodEstimates(), PodEstimates(), PodEstimates()
    for i in range(MIN_SAMPLES + 1):
        RequestLoad(known, None, SIZE, 10.0 * i).on_response(10.0 * i + 2, Timing(compute=1.0))
    assert known.prefill.count >= MIN_SAMPLES
    fill_in([("a", known), ("a", unknown), ("b", other)])
    assert unknown.prefill.cost == known.prefill.cost != PREFILL_PRIOR
    assert (unknown.prefill.count, other.prefill.cost) == (0, PREFILL_PRIOR)


class VllmEngine:
    """An engine that reports nothing in its answers: it counts, and legs take longer."""

    OVERHEAD = 0.03
    ITL = 0.05

    def __init__(self) -> None:
        self.pod, self.now, self.seconds, self.tokens, self.count = PodEstimates(), 10.0, 0.0, 0, 0
        self.decoding = 0.0
        self.scrape()

    def scrape(self) -> None:
        counters = EngineCounters(
            prefill_seconds=self.seconds,
            prefills=float(self.count),
            prefill_tokens=float(self.tokens),
            queue_seconds=0.0,
            decode_seconds=self.decoding,
            itl_seconds=self.decoding,
            itls=self.decoding / self.ITL,
        )
        self.pod.on_counters(counters, Gauges(), None, self.now)

    def serve(self, tokens: int, *, is_stream: bool = True, has_header: bool = True) -> None:
        """One request alone, and a scrape after its end."""
        load = RequestLoad(
            self.pod, None, PlacedPrompt(tokens, 0, 0, 10.0, is_stream=is_stream), self.now
        )
        seconds = self.true_seconds(tokens)
        leg = seconds + self.OVERHEAD
        decoding = 0.0 if is_stream else 2.0
        generated = 1 + round(decoding / self.ITL)
        timing = Timing(
            leg=leg + decoding, prompt=tokens, cached=0, computed=tokens, generated=generated
        )
        load.on_response(self.now + leg + decoding, timing if has_header else UNKNOWN)
        self.now += leg + 2.0
        self.decoding += decoding
        self.seconds, self.tokens, self.count = (
            self.seconds + seconds, self.tokens + tokens, self.count + 1,
        )  # fmt: skip
        load.end(self.now)
        self.now += 0.1
        self.scrape()

    def true_seconds(self, tokens: int) -> float:
        return 0.002 + 2e-5 * tokens


@pytest.mark.parametrize(
    ("is_stream", "has_header"), [(True, True), (False, True), (True, False), (False, False)]
)
def test_engines_that_only_count_are_predicted_by_their_own_seconds(
    is_stream: bool, has_header: bool
) -> None:
    engine = VllmEngine()
    for i in range(50):
        engine.serve(200 + i * 613 % 3300, is_stream=is_stream, has_header=has_header)
    for tokens in (200, 1000, 3500):
        predicted = engine.pod.prefill.cost.seconds(tokens)
        assert predicted == pytest.approx(engine.true_seconds(tokens), rel=0.05)


def test_a_leg_shorter_than_the_usual_overhead_is_not_all_overhead() -> None:
    engine = VllmEngine()
    for _ in range(5):
        engine.serve(1000)
    load = RequestLoad(engine.pod, None, PlacedPrompt(10, 0, 0, 1.0), engine.now)
    load.on_response(engine.now + 0.01, Timing(leg=0.01, prompt=10, cached=0))
    assert engine.pod.prefill.window.samples[-1].seconds == pytest.approx(0.001)


def test_counters_are_used_again_when_answers_have_told_nothing_for_a_minute() -> None:
    engine = VllmEngine()
    for _ in range(3):
        engine.serve(1000)
    assert engine.pod.prefill.count == 2
    engine.serve(1000, is_stream=False, has_header=False)
    assert engine.pod.prefill.count == 2
    engine.now += 60.0
    engine.serve(1000, is_stream=False, has_header=False)
    assert engine.pod.prefill.count == 3


def test_a_split_request_is_counted_by_both_engines() -> None:
    decode, prefill = PodEstimates(), PodEstimates()
    counters = EngineCounters(
        prefill_seconds=0.0, prefills=0.0, prefill_tokens=0.0, queue_seconds=0.0
    )
    for pod in (decode, prefill):
        pod.on_counters(counters, Gauges(), None, 0.0)
    load = RequestLoad(decode, prefill, PlacedPrompt(1000, 0, 0, 10.0), 1.0)
    load.on_response(2.0, Timing(leg=1.0, prompt=1000, cached=0), prefill)
    load.end(5.0)
    for pod, seconds, tokens in ((decode, 0.01, 1.0), (prefill, 0.9, 1000.0)):
        counted = EngineCounters(
            prefill_seconds=seconds, prefills=1.0, prefill_tokens=tokens, queue_seconds=0.0
        )
        pod.on_counters(counted, Gauges(), None, 6.0)
    assert prefill.own.overhead == pytest.approx(0.1)
    assert (decode.own.overhead, decode.prefill.count) == (None, 0)


def test_a_pod_that_has_long_taught_nothing_returns_to_alike_pods() -> None:
    busy, idle, other = PodEstimates(), PodEstimates(), PodEstimates()
    sample = prefill_sample([(1000, 0)], 1.0)
    for pod, at in ((busy, 5000.0), (idle, 5000.0), (other, 5000.0 - STALE_SECONDS - 1)):
        slowness = 9.0 if pod is other else 1.0
        pod.prefill.add(sample._replace(seconds=slowness), at)
    pods = [("a", busy), ("a", idle), ("a", other)]
    fill_in(pods)
    assert other.prefill.count == 1
    fill_in(pods, is_same_role=True)
    assert (busy.prefill.count, idle.prefill.count, other.prefill.count) == (1, 1, 0)
    assert other.prefill.cost == busy.prefill.cost
    fill_in([("a", busy)], is_same_role=True)
    assert busy.prefill.count == 1, "no alike pod knows better"


def report(leg: float, inflight: int | None = None) -> Timing:
    """As a sidecar writes it for a prompt of 1000 tokens of vLLM."""
    seen = "" if inflight is None else f";inflight={inflight}"
    return parse_timing(f"leg={leg};prompt=1000;cached=0;computed=1000{seen}")


def test_a_prompt_beside_one_of_another_router_does_not_teach_half_the_speed() -> None:
    """The engine computes both in 2 s; this EPP knows of one."""
    pod, size = PodEstimates(), PlacedPrompt(1000, 0, 0, 10.0, is_stream=True)
    for i in range(8):
        inflight = i % 2
        load = RequestLoad(pod, None, size, 10.0 * i)
        load.on_response(10.0 * i + 1.0 + inflight, report(1.0 + inflight, inflight))
        load.end(10.0 * i + 5.0)
    assert pod.prefill.cost.seconds(1000) == pytest.approx(1.0, rel=0.01)


def test_prompts_that_this_epp_placed_beside_each_other_teach_together() -> None:
    pod, size = PodEstimates(), PlacedPrompt(1000, 0, 0, 10.0, is_stream=True)
    for i in range(4):
        now = 10.0 * i
        loads = [RequestLoad(pod, None, size, now) for _ in range(2)]
        for load in loads:
            load.on_response(now + 2.0, report(2.0, inflight=1))
            load.end(now + 5.0)
    assert pod.prefill.count == 3
    assert pod.prefill.cost.seconds(1000) == pytest.approx(1.0, rel=0.01)


def test_an_unknown_prompt_spoils_all_that_ran_beside_it() -> None:
    pod, size = PodEstimates(), PlacedPrompt(1000, 0, 0, 10.0, is_stream=True)
    first, second = RequestLoad(pod, None, size, 0.0), RequestLoad(pod, None, size, 1.0)
    first.on_response(2.0, report(2.0, inflight=1))
    second.on_response(4.0, report(3.0, inflight=2))
    assert (pod.prefill.count, pod.observed_at) == (0, 2.0)
    learn(pod, report(1.0, inflight=0), seconds=1.0, size=size)
    assert pod.prefill.cost.seconds(1000) == pytest.approx(1.0, rel=0.01)


def test_what_another_decode_pod_sent_is_not_what_this_sidecar_saw() -> None:
    """Two decode pods use one prefill pod, and so does an unknown router through the first."""
    prefill, size = PodEstimates(), PlacedPrompt(1000, 0, 0, 10.0)
    decodes = [PodEstimates(), PodEstimates()]
    for number, decode in enumerate(decodes):
        decode.sidecar = f"10.0.0.{number}:8000"
    loads = [RequestLoad(decode, prefill, size, 0.0) for decode in decodes]
    loads[0].on_response(3.0, report(3.0, inflight=1), prefill)
    loads[1].on_response(3.0, report(3.0, inflight=0), prefill)
    assert prefill.prefill.count == 0
    # Data-parallel ranks of one decode pod share its sidecar.
    decodes[1].sidecar = decodes[0].sidecar
    for now in (10.0, 20.0):
        for load in [RequestLoad(decode, prefill, size, now) for decode in decodes]:
            load.on_response(now + 2.0, report(2.0, inflight=1), prefill)
            load.end(now + 2.0)
    assert prefill.prefill.cost.seconds(1000) == pytest.approx(1.0, rel=0.01)


@pytest.mark.parametrize("events", [*permutations(("response", "end", "move", "end"))])
def test_no_prompt_stays_under_way(events: tuple[str, ...]) -> None:
    decode, other, prefill = PodEstimates(), PodEstimates(), PodEstimates()
    other.sidecar = "10.0.0.2:8000"
    load = RequestLoad(decode, prefill, SIZE, 0.0)
    assert len(prefill.overlaps) == 1
    for event in events:
        match event:
            case "response":
                load.on_response(1.0, UNKNOWN, prefill)
            case "end":
                load.end(2.0)
            case "move":
                load.move_decode(other)
    assert not len(prefill.overlaps)


def test_the_share_of_transfers_that_is_waited_for_is_learned() -> None:
    """Streamed hand-offs make a pod cheaper to transfer to, and sequential ones dearer again."""
    prefill, decode = PodEstimates(), PodEstimates()

    def hand_off(
        streamed: int | None = 1, waited: float | None = None, transfer: float = 0.05
    ) -> float:
        load = RequestLoad(decode, prefill, PlacedPrompt(1000, 0, 0, 10.0, is_stream=True), 0.0)
        timing = Timing(leg=0.2, transfer=transfer, bytes=10**8, streamed=streamed, waited=waited)
        load.on_response(0.3, timing, prefill)
        load.end(0.4)
        return decode.figures(0.5).exposed

    assert hand_off(None) == 1.0
    shares = [hand_off() for _ in range(16)]
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == pytest.approx(STREAMED_SHARE, abs=0.02)
    assert hand_off(None) > shares[-1]
    assert [hand_off(waited=0.02) for _ in range(20)][-1] == pytest.approx(0.4, abs=0.01)
    # A small transfer that waited for a step of the engine hardly counts.
    assert hand_off(waited=0.02, transfer=0.001) == pytest.approx(0.4, abs=0.02)
    decode.restart()
    assert decode.figures(0.6).exposed == 1.0
