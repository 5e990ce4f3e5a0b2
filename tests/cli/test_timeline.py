"""What EPPs and sidecars remember, as one story."""

from tandem_cli.timeline import Decided, Heard, Served, Silent, join, lines, to_json, unknown
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_contract.trace import CandidateTrace, DecisionTrace, LegTrace, SidecarTrace

DECISION = DecisionTrace(
    "r",
    1000.0,
    0.0005,
    model="m",
    path=RoutingPath.PREFILL_THEN_DECODE,
    reason="worth_it",
    decode=(CandidateTrace("d-0", "10.0.0.1:8000", 2, waiting=1.0, kv_usage=0.25),),
    prefill=(CandidateTrace("p-0", "10.0.0.2:8000"), CandidateTrace("p-1", "10.0.0.3:8000", 4)),
    prompt_tokens=500,
    cached_tokens=16,
    status=200,
    timing=Timing(queue=0.001),
    ended=2.0,
)
ACCOUNT = SidecarTrace(
    "r",
    "completions",
    "/v1/completions",
    1000.002,
    path=RoutingPath.PREFILL_THEN_DECODE,
    reason="worth_it",
    outcome="answered",
    status=200,
    first_byte=1.25,
    ended=1.9,
    legs=(
        LegTrace("prefill", "p-0", "r-1", 0.001, ended=0.5, result="busy", status=503),
        LegTrace(
            "prefill",
            "p-1",
            "r-2",
            0.501,
            ended=1.0,
            result="answered",
            status=200,
            timing=Timing(queue=0.1, compute=0.3, cached=0, computed=500),
        ),
        LegTrace(
            "decode",
            "d-0",
            "r-2",
            1.001,
            first_byte=1.2,
            ended=1.9,
            result="answered",
            status=200,
            timing=Timing(transfer=0.125, bytes=4096),
        ),
    ),
)


def test_one_request_in_the_order_of_its_events() -> None:
    heard = Heard((Decided("epp", DECISION),), (Served("d-0", ACCOUNT),))
    assert list(lines("r", heard)) == [
        "Request r, 1970-01-01 00:16:40.000+00:00",
        "       0.0 ms  decided    prefill_then_decode (worth_it): 500 prompt tokens, 16 of them"
        " cached there; epp took 0.5 ms",
        "       0.0 ms    decode   d-0 (2 in flight, 1 waiting, 25% of its KV cache in use)",
        "       0.0 ms    prefill  p-0 (0 in flight), then p-1",
        "       2.0 ms  received   by d-0: completions /v1/completions",
        "       3.0 ms  prefill    on p-0: busy after 499.0 ms, status 503",
        "     503.0 ms  prefill    on p-1: answered after 499.0 ms, status 200"
        " [queue 100.0 ms, compute 300.0 ms, tokens computed 500, tokens cached 0]",
        "    1003.0 ms  decode     on d-0: answered after 899.0 ms, status 200,"
        " first byte after 199.0 ms [KV transfer 125.0 ms, KV bytes 4096]",
        "    1252.0 ms  first byte to the client",
        "    1902.0 ms  ended      answered, status 200, prefill_then_decode (worth_it)",
        "    2000.0 ms  closed     status 200, as epp saw it [queue 1.0 ms]",
        "",
    ]


def test_an_account_belongs_to_the_latest_decision_before_it_that_named_its_pod() -> None:
    first = Decided("epp-a", DECISION)
    again = Decided("epp-b", DecisionTrace("r", 1010.0, 0.0, decode=DECISION.decode))
    elsewhere = Decided("epp-b", DecisionTrace("r", 1011.0, 0.0, decode=DECISION.prefill))
    accounts = [
        Served("d-0", SidecarTrace("r", "chat", "/", received))
        for received in (999.5, 1000.5, 1010.5, 1011.5)
    ]
    stray = Served("d-9", SidecarTrace("r", "chat", "/", 1005.0))
    heard = Heard((elsewhere, again, first), (stray, *reversed(accounts)))
    assert [(p.decided, p.served) for p in join(heard)] == [
        (first, tuple(accounts[:2])),
        (None, (stray,)),
        (again, tuple(accounts[2:])),
        (elsewhere, ()),
    ]
    assert next(lines("r", heard)).startswith("Request r (1 of 4), ")


def test_a_refusal_and_a_request_that_runs() -> None:
    refused = DecisionTrace("r", 1.0, 0.001, reason="unknown_model", status=404, ended=0.001)
    running = SidecarTrace(
        "r", "chat", "/", 5.0, legs=(LegTrace("decode", "d-0", "r-1", 0.5, detail="why"),)
    )
    heard = Heard((Decided("epp", refused),), (Served("d-0", running),))
    assert [line[15:] for line in lines("r", heard) if " ms  " in line] == [
        "refused    unknown_model, status 404; epp took 1.0 ms",
        "received   by d-0: chat /",
        "decode     on d-0: running, why",
    ]


def test_programs_get_every_figure_with_its_source() -> None:
    silent = (Silent("d-1", "no answer within 5 s"),)
    heard = Heard((Decided("epp", DECISION),), (Served("d-0", ACCOUNT),), silent, ("epp", "d-1"))
    told = to_json("r", heard)
    assert told["silent"] == [{"name": "d-1", "why": "no answer within 5 s"}]
    requests = told["requests"]
    assert isinstance(requests, list)
    assert requests[0]["decision"]["epp"] == "epp"
    assert requests[0]["decision"]["prefill"][1]["in_flight"] == 4
    assert requests[0]["served"][0]["pod"] == "d-0"
    assert requests[0]["served"][0]["legs"][2]["timing"]["transfer"] == 0.125
    assert list(lines("r", heard))[-1] == "d-1 did not answer: no answer within 5 s"


def test_an_unknown_id_says_who_was_asked_and_who_did_not_answer() -> None:
    heard = Heard(silent=(Silent("d-1", "refused"),), asked=("epp", "d-0", "d-1"))
    message = unknown("r", heard)
    assert message.startswith(
        "nobody knows request r: asked epp, d-0; d-1 did not answer (refused)"
    )
    assert "--history" in message
    assert unknown("r", Heard()).startswith("nobody knows request r: asked nobody")
