"""What responses say about pods."""

import pytest

from tandem_contract.paths import RoutingPath
from tandem_contract.stalls import STALL_SECONDS
from tandem_epp.backends.outcomes import Outcome, abandoned, decode_outcome, prefill_outcomes

REFUSED = (
    "upstream_reset_before_response_started"
    "{remote_connection_failure|delayed_connect_error:_Connection_refused}"
)
CLOSED = "upstream_reset_before_response_started{connection_termination}"
SPLIT, FALLBACK = RoutingPath.PREFILL_THEN_DECODE, RoutingPath.FALLBACK
A, F, U = Outcome.ANSWERED, Outcome.HANDOFF, Outcome.UNKNOWN


@pytest.mark.parametrize(
    ("status", "details", "outcome"),
    [
        (200, "via_upstream", Outcome.ANSWERED),
        (404, "via_upstream", Outcome.ANSWERED),
        (500, "via_upstream", Outcome.ERROR),
        (502, "via_upstream", Outcome.ERROR),
        (503, "via_upstream", Outcome.BUSY),
        (429, "via_upstream", Outcome.BUSY),
        (504, "via_upstream", Outcome.TIMEOUT),
        (503, REFUSED, Outcome.UNREACHABLE),
        (503, "upstream_reset_before_response_started{connection_timeout}", Outcome.UNREACHABLE),
        (503, CLOSED, Outcome.RESET),
        (503, "upstream_reset_before_response_started{overflow}", Outcome.UNKNOWN),
        (504, "upstream_response_timeout", Outcome.TIMEOUT),
        (504, "stream_idle_timeout", Outcome.TIMEOUT),
        (408, "stream_idle_timeout", Outcome.UNKNOWN),
        (503, "no_healthy_upstream", Outcome.UNKNOWN),
        (413, "request_payload_too_large", Outcome.UNKNOWN),
        (200, None, Outcome.ANSWERED),
        (500, None, Outcome.ERROR),
        (502, None, Outcome.RESET),
        (503, None, Outcome.UNREACHABLE),
        (429, None, Outcome.BUSY),
    ],
)
def test_status_and_origin_decide(status: int, details: str | None, outcome: Outcome) -> None:
    assert decode_outcome(status, details, is_sidecar=False) is outcome


def test_a_sidecars_headers_show_that_the_pod_answered_itself() -> None:
    """For gateways that send no attributes."""
    assert decode_outcome(503, None, is_sidecar=True) is Outcome.BUSY
    assert decode_outcome(502, None, is_sidecar=True) is Outcome.ERROR


def test_busy_and_unknown_are_no_failures() -> None:
    harmless = {outcome for outcome in Outcome if not outcome.is_failure}
    assert harmless == {Outcome.ANSWERED, Outcome.BUSY, Outcome.UNKNOWN}


@pytest.mark.parametrize(
    ("path", "prefill", "status", "has_failed", "outcomes"),
    [
        (SPLIT, "p1", 200, False, [A, U, U]),
        (SPLIT, "p2", 200, False, [F, A, U]),
        (SPLIT, "p3", 200, False, [F, F, A]),
        (SPLIT, "p2", 502, False, [F, A, U]),
        (SPLIT, "p2", 502, True, [F, F, U]),
        (SPLIT, "p1", 503, False, [U, U, U]),
        (SPLIT, None, 200, False, [U, U, U]),
        (SPLIT, "other", 200, False, [U, U, U]),
        (FALLBACK, None, 200, False, [F, U, U]),
        (RoutingPath.UNIFIED, None, 200, False, [U, U, U]),
        (None, None, 200, False, [U, U, U]),
    ],
)
def test_the_sidecars_headers_name_the_prefill_pod(
    path: str | None,
    prefill: str | None,
    status: int,
    has_failed: bool,
    outcomes: list[Outcome],
) -> None:
    candidates = ("p1", "p2", "p3")
    assert (
        list(prefill_outcomes(candidates, path, prefill, status, has_failed=has_failed)) == outcomes
    )


def test_without_prefill_candidates_a_fallback_blames_no_pod() -> None:
    assert list(prefill_outcomes((), FALLBACK, None, 200, has_failed=False)) == []


def test_a_client_that_leaves_accuses_only_a_silent_pod() -> None:
    assert abandoned(silent=STALL_SECONDS) is Outcome.STALLED
    assert abandoned(silent=STALL_SECONDS - 1) is Outcome.UNKNOWN
