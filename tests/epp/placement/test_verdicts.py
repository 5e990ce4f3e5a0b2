"""Outcomes of requests reach the health of the right pods, and the next picks."""

import pytest
from msgspec.structs import replace

from tandem_contract.paths import RoutingPath
from tandem_contract.stalls import STALL_SECONDS
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.health import EJECT_IN_A_ROW, HealthState
from tandem_epp.backends.outcomes import Outcome
from tandem_epp.estimates.engine_figures import EngineCounters, Gauges
from tandem_epp.exchange import BrokenAnswer, Ending, ResponseHeaders
from tandem_epp.placement.verdicts import judge_broken

from .test_picker import NOW, WEIGHTED, PickerSetup

OK = ResponseHeaders(None, 200, details="via_upstream")
ERROR = replace(OK, status=500)
REFUSED = ResponseHeaders(None, 503, details="upstream_reset_before_response_started{overflow}")
SPLIT = replace(OK, path=RoutingPath.PREFILL_THEN_DECODE)


def outcomes(setup: PickerSetup) -> dict[str, dict[Outcome, int]]:
    return {pod.name: dict(pod.health.outcomes) for pod in setup.fleet if pod.health.outcomes}


@pytest.mark.parametrize("plugins", ["{}", "plugins: [{type: prefix-cache-scorer}]"])
def test_few_retries_of_a_failed_request_return_to_the_pod_that_failed_it(plugins: str) -> None:
    setup = PickerSetup(plugins, **{f"d{i}": "decode" for i in range(10)})
    first, _ = setup.place()
    bad = first.decode
    met = 0
    for retry in range(51):
        placement = first if retry == 0 else setup.place()[0]
        met += retry > 0 and placement.decode is bad
        placement.on_response_headers(ERROR if placement.decode is bad else OK, NOW)
        placement.end(NOW)
    assert met <= 2


def test_an_error_of_the_decode_pod_counts_there_and_not_at_its_prefill_pod() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    placement, _ = setup.place()
    placement.on_response_headers(replace(SPLIT, status=502, prefill="p"), NOW)
    placement.end(NOW)
    assert outcomes(setup) == {"d": {Outcome.ERROR: 1}, "p": {Outcome.ANSWERED: 1}}


def test_a_prefill_pod_that_the_sidecar_passed_over_has_failed() -> None:
    setup = PickerSetup(d="decode", p="prefill", q="prefill")
    placement, plan = setup.place()
    first, second = (target.name for target in plan.prefill)
    placement.on_response_headers(replace(SPLIT, prefill=second), NOW)
    assert outcomes(setup) == {
        "d": {Outcome.ANSWERED: 1},
        first: {Outcome.HANDOFF: 1},
        second: {Outcome.ANSWERED: 1},
    }


def test_a_fallback_after_a_split_plan_counts_at_the_prefill_pod() -> None:
    setup = PickerSetup(d="decode", p="prefill")
    placement, _ = setup.place()
    placement.on_response_headers(replace(SPLIT, path=RoutingPath.FALLBACK), NOW)
    assert outcomes(setup) == {"d": {Outcome.ANSWERED: 1}, "p": {Outcome.HANDOFF: 1}}


def test_without_fallback_the_sidecars_error_is_the_prefill_pods() -> None:
    setup = PickerSetup(strict="", d="decode", p="prefill")
    placement, _ = setup.place()
    placement.on_response_headers(replace(SPLIT, status=502, prefill="10.0.0.2:8000"), NOW)
    assert outcomes(setup) == {"d": {Outcome.UNKNOWN: 1}, "p": {Outcome.HANDOFF: 1}}


@pytest.mark.parametrize(
    ("status", "timing", "expected"),
    [
        (503, "-", {"d": {Outcome.UNKNOWN: 1}, "p": {Outcome.UNKNOWN: 1}}),
        (503, "leg=0.1", {"d": {Outcome.BUSY: 1}, "p": {Outcome.UNKNOWN: 1}}),
        (502, "-", {"d": {Outcome.UNKNOWN: 1}, "p": {Outcome.HANDOFF: 1}}),
        (502, "leg=0.1", {"d": {Outcome.ERROR: 1}, "p": {Outcome.ANSWERED: 1}}),
    ],
    ids=["prefill busy", "decode busy", "prefill failed", "decode failed"],
)
def test_without_fallback_the_times_of_a_prefill_tell_which_pod_failed(
    status: int, timing: str, expected: dict[str, dict[Outcome, int]]
) -> None:
    setup = PickerSetup(strict="", d="decode", p="prefill")
    placement, _ = setup.place()
    response = replace(SPLIT, status=status, prefill="p", timing=timing, retry_after="1")
    placement.on_response_headers(response, NOW)
    assert outcomes(setup) == expected
    is_busy = setup["d"].health.state is HealthState.PAUSED
    assert is_busy is (expected["d"] == {Outcome.BUSY: 1})


def test_failing_prefill_pods_are_not_named_again() -> None:
    setup = PickerSetup(WEIGHTED, d="decode", p="prefill", q="prefill")
    for i in range(2 * EJECT_IN_A_ROW):
        placement, plan = setup.place(f"{i} " * 400)
        path = RoutingPath.FALLBACK if plan.prefill[0].name == "p" else SPLIT.path
        prefill = None if path is RoutingPath.FALLBACK else "q"
        placement.on_response_headers(replace(SPLIT, path=path, prefill=prefill), NOW)
        placement.end(NOW)
        if setup["p"].health.is_ejected:
            break
    assert setup["p"].health.is_ejected
    assert [target.name for target in setup.place("other " * 400)[1].prefill] == ["q"]


def test_what_envoy_refuses_itself_counts_at_no_pod() -> None:
    setup = PickerSetup(d="decode")
    setup.place("hi")[0].on_response_headers(REFUSED, NOW)
    assert outcomes(setup) == {"d": {Outcome.UNKNOWN: 1}}
    assert setup["d"].health.failure_rate == 0


def test_a_draining_pod_pauses_for_as_long_as_it_says() -> None:
    setup = PickerSetup(d1="decode", d2="decode")
    placement, _ = setup.place("hi")
    placement.on_response_headers(replace(OK, status=503, retry_after="7"), NOW)
    health = placement.decode.health
    assert (health.state, health.until, health.failure_rate) == (HealthState.PAUSED, NOW + 7, 0)
    assert {setup.place("hi")[0].decode for _ in range(8)}.isdisjoint({placement.decode})


def test_only_the_first_response_headers_count() -> None:
    setup = PickerSetup(d="decode")
    placement, _ = setup.place("hi")
    for _ in range(2):
        placement.on_response_headers(OK, NOW)
    placement.end(NOW)
    assert outcomes(setup) == {"d": {Outcome.ANSWERED: 1}}


@pytest.mark.parametrize(
    ("seconds", "other_answered", "generated", "outcome"),
    [
        (STALL_SECONDS, False, 0.0, Outcome.STALLED),
        (STALL_SECONDS - 1, False, 0.0, Outcome.UNKNOWN),
        (STALL_SECONDS, True, 0.0, Outcome.UNKNOWN),
        (STALL_SECONDS, False, 1.0, Outcome.UNKNOWN),
    ],
    ids=["silent", "impatient client", "another request was answered", "generates"],
)
def test_a_client_that_leaves_a_silent_pod_counts_as_a_stall(
    seconds: float, other_answered: bool, generated: float, outcome: Outcome
) -> None:
    setup = PickerSetup(d="decode")
    placement, _ = setup.place("hi")
    if other_answered:
        setup.place("hi")[0].on_response_headers(OK, NOW + 1)
        setup["d"].health.outcomes.clear()
    counters = EngineCounters(generated_tokens=generated or None)
    setup["d"].apply_scrape(ScrapeResult(Gauges(), b"", counters=counters), NOW + seconds)
    placement.end(NOW + seconds)
    assert outcomes(setup) == {"d": {outcome: 1}}


STREAM = replace(OK, is_stream=True)
"""The headers of a stream that vLLM sent before it computed anything."""
FROM_SIDECAR = replace(STREAM, path=RoutingPath.UNIFIED)
"""Headers that came with the first token."""


def scraped(setup: PickerSetup, tokens: float | None, now: float, running: float = 1.0) -> None:
    counters = EngineCounters(generated_tokens=tokens)
    setup["d"].apply_scrape(ScrapeResult(Gauges(running=running), b"", counters=counters), now)


@pytest.mark.parametrize(
    ("response", "scrapes", "expected"),
    [
        (STREAM, [(9, 60, 1)], {Outcome.STALLED: 1}),
        (STREAM, [(9, 59, 1)], {Outcome.UNKNOWN: 1}),
        (STREAM, [(10, 1, 1), (10, 61, 1)], {Outcome.STALLED: 1}),
        (STREAM, [(10, 1, 1), (10, 59, 1)], {Outcome.ANSWERED: 1}),
        (STREAM, [(9, 59, 1), (10, 60, 1)], {Outcome.ANSWERED: 1}),
        (STREAM, [(9, 60, 0)], {Outcome.STALLED: 1}),
        (STREAM, [], {Outcome.ANSWERED: 1}),
        (STREAM, [(10, 1, 1), (10, 61, 0)], {Outcome.ANSWERED: 1}),
        (STREAM, [(None, 60, 1)], {Outcome.ANSWERED: 1}),
        (FROM_SIDECAR, [(9, 61, 1)], {Outcome.ANSWERED: 1, Outcome.STALLED: 1}),
        (FROM_SIDECAR, [(9, 59, 1), (10, 60, 1)], {Outcome.ANSWERED: 1}),
        (FROM_SIDECAR, [(9, 61, 0)], {Outcome.ANSWERED: 1}),
        (FROM_SIDECAR, [(None, 60, 1)], {Outcome.ANSWERED: 1}),
        (replace(STREAM, status=503), [(9, 60, 1)], {Outcome.BUSY: 1}),
        (replace(STREAM, details="overflow", status=503), [(9, 60, 1)], {Outcome.UNKNOWN: 1}),
    ],
    ids=[
        "stalled from the start",
        "left before it counts as a stall",
        "stalled in the middle",
        "left in the middle, early",
        "queued for long",
        "stalled from the start, gauges of an idle engine",
        "ended before a scrape",
        "a client that reads slowly",
        "tokens are not reported",
        "sidecar, stalled",
        "sidecar, flowing",
        "sidecar, a client that reads slowly",
        "sidecar, tokens are not reported",
        "refused by the pod",
        "refused by Envoy",
    ],
)
def test_the_end_of_an_answer_tells_whether_the_pod_stalled_after_its_headers(
    response: ResponseHeaders,
    scrapes: list[tuple[float | None, float, float]],
    expected: dict[Outcome, int],
) -> None:
    setup = PickerSetup(d="decode")
    is_reported = not scrapes or scrapes[0][0] is not None
    scraped(setup, 9 if is_reported else None, NOW - 1)
    placement, _ = setup.place("hi")
    placement.on_response_headers(response, NOW)
    for tokens, after, running in scrapes:
        scraped(setup, tokens, NOW + after, running)
    placement.end(NOW + 100)
    assert outcomes(setup) == {"d": expected}


def test_headers_that_prove_nothing_do_not_hide_a_pod_that_stalls() -> None:
    setup = PickerSetup(d="decode")
    scraped(setup, 9, NOW - 1)
    placements = [setup.place(f"{number}")[0] for number in range(EJECT_IN_A_ROW)]
    for number, placement in enumerate(placements):
        placement.on_response_headers(STREAM, NOW + 30 * number)
    scraped(setup, 9, NOW + STALL_SECONDS)
    for placement in placements:
        placement.end(NOW + STALL_SECONDS)
    assert setup["d"].health.should_eject
    assert outcomes(setup) == {"d": {Outcome.STALLED: EJECT_IN_A_ROW}}


def test_a_probe_that_is_a_stream_ends_the_ejection_when_tokens_flowed() -> None:
    setup = PickerSetup(d="decode", other="decode")
    scraped(setup, 9, NOW - 1)
    setup.fleet.ejections.eject(setup["d"], NOW - 10)
    setup.fleet.ejections.advance(NOW)
    placement = next(p for p in (setup.place("hi")[0] for _ in range(99)) if p.decode.name == "d")
    placement.on_response_headers(STREAM, NOW)
    assert setup["d"].health.state is HealthState.PROBING
    scraped(setup, 10, NOW + 1)
    placement.end(NOW + 2)
    assert setup["d"].health.state is HealthState.SERVING


def test_what_tandems_envoy_sent_to_the_alternate_was_not_taken_by_the_chosen_pod() -> None:
    setup = PickerSetup(d1="decode", d2="decode", p="prefill")
    placement, _ = setup.place()
    chosen, alternate = placement.decode, placement.pods.alternate
    assert alternate is not None
    placement.on_response_headers(replace(OK, served=alternate.address), NOW)
    assert (chosen.in_flight, alternate.in_flight) == (0, 1)
    assert outcomes(setup)[chosen.name] == {Outcome.UNREACHABLE: 1}
    assert outcomes(setup)[alternate.name] == {Outcome.ANSWERED: 1}
    assert setup.place("hi")[0].decode is alternate, "until the other one answers a scrape"


LISTED = "plugins: [{type: predicted-cost, parameters: {maxNumOfEndpoints: 2}}]"


def test_a_served_alternate_takes_over_the_count_and_the_prompt() -> None:
    setup = PickerSetup(LISTED, d1="decode", d2="decode", p="prefill")
    placement, _ = setup.place()
    chosen = placement.decode
    (other,) = {setup["d1"], setup["d2"]} - {chosen}
    placement.on_response_headers(replace(ERROR, status=200, served=other.address), NOW)
    assert (chosen.in_flight, other.in_flight) == (0, 1)
    setup.down(chosen.name)
    _, plan = setup.place()
    assert (plan.path, plan.decode.name) == (RoutingPath.FAST_DECODE, other.name)
    assert outcomes(setup)[other.name] == {Outcome.ANSWERED: 1}
    assert chosen.name not in outcomes(setup)
    placement.end(NOW)
    assert other.in_flight == 1, "the second request"


@pytest.mark.parametrize("served", ["10.9.9.9:1", "10.0.0.1:8000", None])
def test_the_address_of_no_other_pod_changes_nothing(served: str | None) -> None:
    setup = PickerSetup(d="decode")
    placement, _ = setup.place("hi")
    placement.on_response_headers(replace(OK, served=served), NOW)
    assert placement.decode is setup["d"]
    placement.end(NOW)
    assert setup["d"].in_flight == 0


def test_a_broken_answer_counts_at_the_pod_with_its_address() -> None:
    setup = PickerSetup(d1="decode", d2="decode")
    judge_broken(setup.fleet, BrokenAnswer("10.0.0.2:8000", NOW), NOW + 1)
    judge_broken(setup.fleet, BrokenAnswer("10.9.9.9:8000", NOW), NOW + 1)
    assert outcomes(setup) == {"d2": {Outcome.BROKEN: 1}}
    assert setup["d2"].health.failure_rate > 0


def test_a_pod_that_breaks_each_answer_off_is_ejected() -> None:
    setup = PickerSetup(d1="decode", d2="decode")
    bad = setup["d1"]
    for _ in range(3):
        setup.fleet.ejections.record(bad, Outcome.ANSWERED, NOW, NOW)
        judge_broken(setup.fleet, BrokenAnswer("10.0.0.1:8000", NOW), NOW)
    assert bad.health.is_ejected


@pytest.mark.parametrize(
    ("ending", "generated", "expected"),
    [
        (Ending.IDLE, False, Outcome.STALLED),
        (Ending.IDLE, True, Outcome.STALLED),
        (Ending.LEFT, False, Outcome.STALLED),
        (Ending.LEFT, True, None),
    ],
)
def test_an_answer_that_nothing_followed_is_a_stall_unless_the_pod_works_and_its_client_left(
    ending: Ending, generated: bool, expected: Outcome | None
) -> None:
    setup = PickerSetup(d="decode")
    if generated:
        scraped(setup, 10, NOW + 1)
    judge_broken(setup.fleet, BrokenAnswer("10.0.0.1:8000", NOW, ending=ending), NOW + 99)
    assert outcomes(setup) == ({} if expected is None else {"d": {expected: 1}})
