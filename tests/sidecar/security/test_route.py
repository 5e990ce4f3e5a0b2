"""Which headers are trusted to name prefill pods."""

import pytest

from tandem_contract.commandline import HostPort
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import (
    RESUME,
    Plan,
    PlanRejected,
    Target,
    Timeouts,
    mac_of,
    prove_prefill,
    sign,
)
from tandem_http1.messages import Request
from tandem_sidecar.security.route import (
    AllowList,
    Candidate,
    ProvenLeg,
    Route,
    UsedPlans,
    parse_allow,
    proven_leg,
    route,
)

KEYS = {"a": b"0123456789abcdef"}
NOW = 1000.0
ALLOW = parse_allow(("10.0.0.0/8", "pod-1:8000", "fd00::/16"))
SPLIT = RoutingPath.PREFILL_THEN_DECODE


def request(*headers: tuple[str, str]) -> Request:
    pairs = [(k.encode(), v.encode()) for k, v in headers]
    return Request(
        b"POST", b"/v1/completions", pairs, dict(pairs), b"", http10=False, keep_alive=True
    )


def routed(*headers: tuple[str, str], keys: dict[str, bytes] | None = None) -> Route:
    return choose(request(*headers), keys=keys)


def choose(
    sent: Request,
    request_id: str = "r1",
    *,
    keys: dict[str, bytes] | None = None,
    pod: str = "10.0.0.9:8000",
    used: UsedPlans | None = None,
) -> Route:
    """The route of `sent` at the pod with the address `pod`."""
    return route(
        *(sent, request_id, keys or {}, ALLOW, NOW),
        is_own=lambda target: target.address == pod,
        used=used or UsedPlans(),
    )


def proven(
    sent: Request,
    now: float = NOW,
    *,
    keys: dict[str, bytes] = KEYS,
    pod: str = "10.0.0.5:8000",
    used: UsedPlans | None = None,
) -> ProvenLeg | None:
    """The leg that `sent` is at the pod with the address `pod`."""
    return proven_leg(
        *(sent, keys, now),
        is_own=lambda target: target.address == pod,
        used=used or UsedPlans(),
    )


def plan(path: RoutingPath = SPLIT, **changes: object) -> Plan:
    values: dict[str, object] = {
        "path": path,
        "reason": "long_prompt",
        "decode": Target("decode-1", "10.0.0.9:8000"),
        "prefill": (Target("prefill-1", "10.1.2.3:8000"), Target("", "pod-2:9000")),
        "request_id": "r1",
        "expires": NOW + 1,
    }
    return Plan(**(values | changes))  # type: ignore[arg-type]  # a table of its fields


def test_a_valid_plan_is_followed() -> None:
    signed = sign(plan(), KEYS, now=NOW)
    assert routed(("x-tandem-plan", signed), keys=KEYS) == Route(
        SPLIT,
        "long_prompt",
        (
            Candidate("prefill-1", HostPort("10.1.2.3", 8000)),
            Candidate("pod-2:9000", HostPort("pod-2", 9000)),
        ),
        decode_name="decode-1",
        decode_address="10.0.0.9:8000",
        routed=True,
        plan=mac_of(signed),
    )


def test_a_plan_names_the_pod_that_a_stream_leaves() -> None:
    """Only of a split; whether it hands off, its connector tells."""
    left = Target("decode-0", "10.0.0.8:8000", 1, asks_for_proof=True)
    candidate = Candidate("decode-0", HostPort("10.0.0.8", 8000), 1, asks_for_proof=True)
    for path, expected in ((SPLIT, candidate), (RoutingPath.UNIFIED, None)):
        signed = sign(plan(path, left=left, left_plan="mac"), KEYS, now=NOW)
        result = routed(("x-tandem-plan", signed), keys=KEYS)
        assert (result.left, result.left_plan) == (expected, "mac")


def test_a_plan_names_the_rank_of_each_leg() -> None:
    target, prefill = Target("d", "10.0.0.9:8000", 3), Target("p", "10.1.2.3:8000", 0)
    signed = sign(plan(decode=target, prefill=(prefill,)), KEYS, now=NOW)
    result = routed(("x-tandem-plan", signed), keys=KEYS)
    assert (result.decode_rank, result.candidates[0].rank) == (3, 0)


def test_a_plan_states_the_timeouts() -> None:
    signed = sign(plan(timeouts=Timeouts(5.0, 2.5)), KEYS, now=NOW)
    assert routed(("x-tandem-plan", signed), keys=KEYS).timeouts == Timeouts(5.0, 2.5)


def test_a_plan_without_a_split_has_no_candidates() -> None:
    signed = sign(plan(RoutingPath.FAST_DECODE), KEYS, now=NOW)
    result = routed(("x-tandem-plan", signed), keys=KEYS)
    assert (result.path, result.candidates) == (RoutingPath.FAST_DECODE, ())


@pytest.mark.parametrize("path", RoutingPath)
@pytest.mark.parametrize(
    ("changes", "keys", "why"),
    [
        ({}, {"b": b"fedcba9876543210"}, "unknown key"),
        ({}, {"a": b"fedcba9876543210"}, "signature is wrong"),
        ({}, {}, "no key"),
        ({"expires": NOW - 1}, KEYS, "expired"),
        ({"request_id": "r2"}, KEYS, "another request"),
        ({"decode": Target("d", "10.0.0.10:8000"), "alternates": ()}, KEYS, "for the pod d"),
    ],
)
def test_the_rest_of_a_stream_is_refused_without_a_plan_that_holds(
    path: RoutingPath, changes: dict[str, object], keys: dict[str, bytes], why: str
) -> None:
    signed = sign(plan(path, reason=RESUME, **changes), KEYS, now=NOW)
    with pytest.raises(PlanRejected, match=why):
        routed(("x-tandem-plan", signed), keys=keys)


def test_the_rest_of_a_stream_is_served_once() -> None:
    sent = request(("x-tandem-plan", sign(plan(reason=RESUME), KEYS, now=NOW)))
    used = UsedPlans()
    assert choose(sent, keys=KEYS, used=used).reason == RESUME
    with pytest.raises(PlanRejected, match="used before"):
        choose(sent, keys=KEYS, used=used)


OTHERS = (Target("decode-2", "10.0.0.10:8000"), Target("decode-3", "10.0.0.11:8000"))


@pytest.mark.parametrize(
    ("alternates", "pod", "holds"),
    [
        ((), "10.0.0.9:8000", True),
        ((), "10.0.0.10:8000", False),
        (OTHERS, "10.0.0.9:8000", True),
        # Envoy retries at an alternate when the first pod cannot be reached.
        (OTHERS, "10.0.0.11:8000", True),
        (OTHERS, "10.0.0.12:8000", False),
        # An EPP of an older version does not state them.
        (None, "10.0.0.12:8000", True),
    ],
)
def test_a_plan_holds_at_the_pods_that_it_names(
    alternates: tuple[Target, ...] | None, pod: str, holds: bool
) -> None:
    signed = sign(plan(alternates=alternates), KEYS, now=NOW)
    chosen = choose(request(("x-tandem-plan", signed)), keys=KEYS, pod=pod)
    assert (chosen.path is SPLIT, bool(chosen.candidates)) == (holds, holds)
    if not holds:
        assert (chosen.reason, "for the pod decode-1" in (chosen.error or "")) == (
            "not_trusted",
            True,
        )


def test_an_alternate_serves_with_its_own_rank() -> None:
    others = (Target("decode-2_dp1", "10.0.0.10:8000", 1),)
    signed = sign(plan(alternates=others), KEYS, now=NOW)
    chosen = choose(request(("x-tandem-plan", signed)), keys=KEYS, pod="10.0.0.10:8000")
    assert (chosen.decode_name, chosen.decode_rank) == ("decode-2_dp1", 1)


@pytest.mark.parametrize("alternates", [(), None], ids=["this version", "an older one"])
def test_a_plan_is_followed_once(alternates: tuple[Target, ...] | None) -> None:
    used = UsedPlans()
    first = request(("x-tandem-plan", sign(plan(alternates=alternates), KEYS, now=NOW)))
    later = plan(alternates=alternates, expires=NOW + 2)
    again = request(("x-tandem-plan", sign(later, KEYS, now=NOW)))
    # At another pod it neither holds nor counts as used.
    if alternates is not None:
        assert choose(first, keys=KEYS, pod="10.0.0.12:8000", used=used).path is not SPLIT
    assert choose(first, keys=KEYS, used=used).path is SPLIT
    repeated = choose(first, keys=KEYS, used=used)
    assert (repeated.path, repeated.candidates) == (RoutingPath.UNIFIED, ())
    assert repeated.error == "the plan was used before"
    # A client may send its id again: the router has decided anew.
    assert choose(again, keys=KEYS, used=used).path is SPLIT


def test_the_previous_key_still_verifies() -> None:
    signed = sign(plan(), KEYS, now=NOW)
    both = KEYS | {"b": b"fedcba9876543210"}
    assert routed(("x-tandem-plan", signed), keys=both).path is SPLIT


BAD = [
    (("x-tandem-plan", sign(plan(request_id="r2"), KEYS, now=NOW)),),
    (("x-tandem-plan", sign(plan(expires=NOW - 1), KEYS, now=NOW)),),
    (("x-tandem-plan", sign(plan(), {"other": b"0123456789abcdef"}, now=NOW)),),
    (("x-tandem-plan", sign(plan(), KEYS, now=NOW)[:-1] + "!"),),
    (("x-tandem-plan", "v1.nonsense"),),
    (("x-tandem-plan", "\xff"),),
    (
        ("x-tandem-plan", sign(plan(), KEYS, now=NOW)),
        ("x-tandem-plan", sign(plan(), KEYS, now=NOW)),
    ),
    (("x-tandem-plan", sign(plan(prefill=(Target("p", "nonsense"),)), KEYS, now=NOW)),),
    (("x-prefiller-host-port", "10.0.0.1:8000"),),
]


@pytest.mark.parametrize("headers", BAD)
def test_with_keys_only_valid_signed_plans_are_trusted(headers: tuple[tuple[str, str]]) -> None:
    result = routed(*headers, keys=KEYS)
    assert (result.path, result.candidates) == (RoutingPath.UNIFIED, ())
    assert result.error
    assert not result.routed


def test_without_routing_headers_the_path_is_unified_without_an_error() -> None:
    for keys in ({}, KEYS):
        assert routed(keys=keys) == Route(RoutingPath.UNIFIED, "unrouted")


def test_without_keys_the_allow_list_decides() -> None:
    candidates = "10.9.8.7:8000, 192.168.0.1:8000,pod-1:8000,pod-1:8001,[fd00::1]:8000"
    result = routed(("x-prefiller-host-port", candidates))
    assert [c.name for c in result.candidates] == ["10.9.8.7:8000", "pod-1:8000", "[fd00::1]:8000"]
    assert (result.path, result.ignored) == (SPLIT, 2)
    assert result.error


@pytest.mark.parametrize("candidates", ["192.168.0.1:8000", "10.0.0.1", "10.0.0.1:99999", "a b:1"])
def test_without_an_allowed_candidate_the_path_is_unified(candidates: str) -> None:
    result = routed(("x-prefiller-host-port", candidates))
    assert (result.path, result.candidates) == (RoutingPath.UNIFIED, ())
    assert result.error


def test_without_keys_a_plan_is_ignored() -> None:
    assert routed(("x-tandem-plan", sign(plan(), KEYS, now=NOW))).path is RoutingPath.UNIFIED


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "10.0.0.1/8", "host", "host:port", "/"])
def test_an_invalid_allow_list_entry_is_named_in_the_error(entry: str) -> None:
    with pytest.raises(ValueError, match=entry):
        parse_allow((entry,))


def test_an_empty_allow_list_allows_nothing() -> None:
    assert HostPort("127.0.0.1", 1) not in AllowList()


UNIFIED_POD = Target("unified-0", "10.0.0.5:8000", 1)


def leg(proof: str, attempt_id: str = "r1-a") -> Request:
    return request(("x-tandem-prefill-proof", proof), ("x-request-id", attempt_id))


def proof(keys: dict[str, bytes] = KEYS, seconds: float = 90.0) -> str:
    return prove_prefill(UNIFIED_POD, "r1-a", keys, now=NOW, seconds=seconds)


def test_a_prefill_leg_is_proven_for_one_pod_and_attempt() -> None:
    assert proven(leg(proof())) == ProvenLeg("r1-a", UNIFIED_POD)
    assert proven(request(("x-request-id", "r1-a"))) is None
    assert proven(leg(proof()), keys={}) is None, "no key to check it with"


def test_a_proof_holds_at_one_pod_and_once() -> None:
    used = UsedPlans()
    with pytest.raises(PlanRejected, match="for another pod"):
        proven(leg(proof()), pod="10.0.0.6:8000", used=used)
    assert proven(leg(proof()), used=used) is not None
    with pytest.raises(PlanRejected, match="used before"):
        proven(leg(proof()), used=used)


@pytest.mark.parametrize(
    ("sent", "now"),
    [
        pytest.param(leg(proof(), "r1-b"), NOW, id="another attempt"),
        pytest.param(leg(proof(seconds=5.0)), NOW + 6, id="expired"),
        pytest.param(leg(proof({"a": b"another-secret-of-16"})), NOW, id="another key"),
        pytest.param(leg("v1.a.e30"), NOW, id="malformed"),
        pytest.param(leg("\xe9"), NOW, id="not ASCII"),
        pytest.param(leg(sign(plan(request_id="r1-a"), KEYS, now=NOW)), NOW, id="a plan"),
    ],
)
def test_a_proof_that_does_not_hold_is_rejected(sent: Request, now: float) -> None:
    with pytest.raises(PlanRejected):
        proven(sent, now)


def test_a_proof_is_no_plan_for_a_split() -> None:
    sent = request(("x-tandem-plan", proof()))
    chosen = choose(sent, "r1-a", keys=KEYS, pod=UNIFIED_POD.address)
    assert (chosen.path, chosen.candidates) == (RoutingPath.UNIFIED, ())


def test_the_plan_says_which_candidates_ask_for_a_proof() -> None:
    prefill = Target("u", "10.1.2.3:8000", None, asks_for_proof=True)
    signed = sign(plan(prefill=(prefill,)), KEYS, now=NOW)
    (candidate,) = routed(("x-tandem-plan", signed), keys=KEYS).candidates
    assert candidate.asks_for_proof
