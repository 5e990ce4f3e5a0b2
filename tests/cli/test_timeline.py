"""Joining the records of EPPs and sidecars to the history of a request."""

from typing import Any

import pytest
from msgspec.structs import replace

from tandem_cli.timeline import (
    REASONS,
    EppRecord,
    NoReply,
    Records,
    SidecarRecord,
    join,
    lines,
    not_found_message,
    to_json,
)
from tandem_contract.paths import RoutingPath
from tandem_contract.timing import Timing
from tandem_contract.trace import (
    CandidateTrace,
    CostTrace,
    DecisionTrace,
    LegTrace,
    MoveTrace,
    SidecarTrace,
)

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
SIDECAR_TRACE = SidecarTrace(
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
            streamed=True,
        ),
    ),
)


def test_the_clients_name_of_the_model_and_the_priority_are_shown() -> None:
    trace = replace(DECISION, model="m", asked="alias", priority=-5)
    shown = list(lines("r", Records((EppRecord("epp", trace),), ())))
    assert "       0.0 ms    model    m, which the client called alias" in shown
    assert "       0.0 ms    priority -5" in shown


def test_a_leg_that_pulled_its_whole_prompt_computed_the_last_token() -> None:
    leg = replace(SIDECAR_TRACE.legs[-1], timing=Timing(cached=500, computed=0, prompt=500))
    records = Records((), (SidecarRecord("d-0", replace(SIDECAR_TRACE, legs=(leg,))),))
    shown = next(line for line in lines("r", records) if " on d-0: " in line)
    assert shown.endswith("[prompt tokens 500, tokens computed 1, tokens cached 500]")


@pytest.mark.parametrize(
    ("decode", "prefill", "is_shown"),
    [
        # vLLM's streams tell nothing at the first token, and its usage no times.
        ({"timing": None}, {}, True),
        ({"timing": Timing(cached=480, computed=20, prompt=500)}, {}, True),
        ({}, {}, False),
        ({"timing": Timing(queue=0.1, compute=0.2)}, {}, False),
        ({"timing": None, "engine_id": "r-3"}, {}, False),
        ({"timing": None}, {"result": "busy"}, False),
        ({"timing": None, "first_byte": None}, {}, False),
    ],
)
def test_a_transfer_that_the_engine_does_not_report_has_a_bound(
    decode: dict[str, Any], prefill: dict[str, Any], is_shown: bool
) -> None:
    _, second, last = SIDECAR_TRACE.legs
    legs = (replace(second, **prefill), replace(last, **decode))
    records = Records((), (SidecarRecord("d-0", replace(SIDECAR_TRACE, legs=legs)),))
    shown = [line for line in lines("r", records) if "not reported" in line]
    line = (
        "    1001.0 ms    KV transfer, not reported by the engine: at most 199.0 ms, from the"
        " hand-off to the first byte of the answer"
    )
    assert shown == ([line] if is_shown else [])


@pytest.mark.parametrize(
    ("move", "shown"),
    [
        (
            MoveTrace(1.5, "crash", "continued", "done", "d-0", "d-1", 37, 37, 537, gap=0.25),
            "    1500.0 ms  moved      from d-0 (crash) to d-1: continued after 37 tokens, done,"
            " the client waited 250.0 ms, 537 tokens to compute once more",
        ),
        (
            MoveTrace(1.5, "drain", "continued", "refused", "d-0", "d-1", 37, 35),
            "    1500.0 ms  moved      from d-0 (drain) to d-1: continued after 37 tokens, 2 of"
            " them generated again, refused",
        ),
        (
            MoveTrace(1.5, "silence", "again", None, "d-0", "d-1", 37, recomputed=37),
            "    1500.0 ms  moved      from d-0 (silence) to d-1: generated again, 37 tokens of"
            " which the client had, no answer yet, 37 tokens to compute once more",
        ),
        (
            MoveTrace(1.5, "drain", "begun_again", "done", "", "d-1"),
            "    1500.0 ms  moved      (drain) to d-1: begun again, as the client had nothing of"
            " it, done",
        ),
        (
            MoveTrace(1.9, "crash", "none", "impossible", "d-0", why="seed is not continued"),
            "    1900.0 ms  not moved  from d-0 (crash): seed is not continued",
        ),
    ],
)
def test_a_move_is_shown_before_the_leg_it_begins(move: MoveTrace, shown: str) -> None:
    leg = LegTrace("decode", "d-1", "r-3", move.at)
    trace = replace(SIDECAR_TRACE, legs=(*SIDECAR_TRACE.legs, leg), moves=(move,))
    told = list(lines("r", Records((), (SidecarRecord("d-0", trace),))))
    at = told.index(shown)
    assert told[at + 1].endswith("decode     on d-1: running")


@pytest.mark.parametrize("at", [0.5, 30.0])
def test_a_router_decides_again_where_a_stream_moves(at: float) -> None:
    first = replace(DECISION, decided=1000.0, decode=(CandidateTrace("d-0", "10.0.0.1:8000"),))
    second = replace(
        DECISION, decided=1000.002 + at, decode=(CandidateTrace("d-1", "10.0.0.4:8000"),)
    )
    again = replace(first, decided=1100.0)
    legs = (LegTrace("decode", "d-0", "r-1", 0.1), LegTrace("decode", "d-1", "r-2", at))
    move = MoveTrace(at, "crash", "continued", "done", "d-0", "d-1", 3, 3)
    trace = replace(SIDECAR_TRACE, legs=legs, moves=(move,))
    records = Records(
        tuple(EppRecord("router", decision) for decision in (second, first, again)),
        (SidecarRecord("d-0", trace),),
    )
    moved, other = join(records)
    assert moved.decision is not None
    assert other.decision is not None
    assert moved.decision.trace is first
    assert [record.trace for record in moved.sidecar_records] == [trace]
    assert [decision.trace for decision in moved.moves] == [second]
    assert other.decision.trace is again
    told = [line[15:] for line in lines("r", records)]
    assert told.index("moved      from d-0 (crash) to d-1: continued after 3 tokens, done") > (
        told.index("  decode   d-1 (0 in flight)")
    )


def test_events_of_one_request_are_in_order() -> None:
    records = Records((EppRecord("epp", DECISION),), (SidecarRecord("d-0", SIDECAR_TRACE),))
    assert list(lines("r", records)) == [
        "Request r, 1970-01-01 00:16:40.000+00:00",
        "       0.0 ms  decided    prefill_then_decode (worth_it): about 500 prompt tokens,"
        " 16 cached on d-0; epp took 0.5 ms",
        f"       0.0 ms    because  {REASONS['worth_it']}",
        "       0.0 ms    decode   d-0 (2 in flight, 1 waiting, 25% of its KV cache in use)",
        "       0.0 ms    prefill  p-0 (0 in flight), then p-1",
        "       2.0 ms  received   by d-0: completions /v1/completions",
        "       3.0 ms  prefill    on p-0: busy after 499.0 ms, status 503",
        "     503.0 ms  prefill    on p-1: answered after 499.0 ms, status 200"
        " [queue 100.0 ms, compute 300.0 ms, tokens computed 500, tokens cached 0]",
        "    1003.0 ms  decode     on d-0: answered after 899.0 ms, status 200,"
        " first byte after 199.0 ms, read KV while the prefill computed it"
        " [KV transfer 125.0 ms, KV bytes 4096]",
        "    1252.0 ms  first byte to the client",
        "    1902.0 ms  ended      answered, status 200, prefill_then_decode",
        "    2000.0 ms  closed     status 200, as epp saw it [queue 1.0 ms]",
        "",
    ]


def test_a_sidecar_record_belongs_to_the_latest_decision_before_it_that_named_its_pod() -> None:
    first = EppRecord("epp-a", DECISION)
    second_record = EppRecord("epp-b", DecisionTrace("r", 1010.0, 0.0, decode=DECISION.decode))
    elsewhere = EppRecord("epp-b", DecisionTrace("r", 1011.0, 0.0, decode=DECISION.prefill))
    sidecar_records = [
        SidecarRecord("d-0", SidecarTrace("r", "chat", "/", received))
        for received in (999.5, 1000.5, 1010.5, 1011.5)
    ]
    stray = SidecarRecord("d-9", SidecarTrace("r", "chat", "/", 1005.0))
    records = Records((elsewhere, second_record, first), (stray, *reversed(sidecar_records)))
    assert [(p.decision, p.sidecar_records) for p in join(records)] == [
        (first, tuple(sidecar_records[:2])),
        (None, (stray,)),
        (second_record, tuple(sidecar_records[2:])),
        (elsewhere, ()),
    ]
    assert next(lines("r", records)).startswith("Request r (1 of 4), ")


def test_the_engines_and_the_sidecars_figures_of_a_leg_are_shown() -> None:
    timing = Timing(leg=0.5, prompt=500)
    leg = LegTrace("prefill", "p-0", "r-1", 0.0, ended=0.5, result="answered", timing=timing)
    record = SidecarRecord("d-0", SidecarTrace("r", "chat", "/", 5.0, legs=(leg,)))
    text = "\n".join(lines("r", Records((), (record,))))
    assert "[leg 500.0 ms, prompt tokens 500]" in text


def test_the_costs_follow_the_choice_and_the_first_token_its_prediction() -> None:
    costs = (CostTrace("d-0", "unified", 0.25, {"wait": 0.05, "prefill": 0.2}, 16, chosen=True),)
    trace = replace(DECISION, costs=costs, predicted_ttft=0.25, measured_ttft=0.2, served="d:1")
    text = list(lines("r", Records((EppRecord("epp", trace),))))
    assert (
        "       0.0 ms    unified  d-0: chosen, cost 250.0 ms = wait 50.0 ms + prefill 200.0 ms,"
        " 16 tokens cached"
    ) in text
    assert "     200.0 ms  first token after 200.0 ms; predicted 250.0 ms (25% too high)" in text
    assert "    2000.0 ms  closed     status 200 from d:1, as epp saw it [queue 1.0 ms]" in text


def test_a_prediction_without_a_measurement_follows_the_costs() -> None:
    costs = (CostTrace("d-0", "unified", 0.25, {"prefill": 0.25}, chosen=True),)
    trace = replace(DECISION, costs=costs, predicted_ttft=0.25)
    text = list(lines("r", Records((EppRecord("epp", trace),))))
    after_costs = text.index("       0.0 ms  predicted  first token after 250.0 ms")
    assert text[after_costs - 1].endswith("cost 250.0 ms = prefill 250.0 ms")


def test_a_reason_that_differs_from_the_plans_is_shown() -> None:
    fallback = replace(SIDECAR_TRACE, path=RoutingPath.FALLBACK, reason="no_plan", legs=())
    records = Records((EppRecord("epp", DECISION),), (SidecarRecord("d-0", fallback),))
    assert any(line.endswith("status 200, fallback (no_plan)") for line in lines("r", records))


def test_a_refused_request_and_a_running_request() -> None:
    refused = DecisionTrace("r", 1.0, 0.001, reason="unknown_model", status=404, ended=0.001)
    running = SidecarTrace(
        "r", "chat", "/", 5.0, legs=(LegTrace("decode", "d-0", "r-1", 0.5, detail="why"),)
    )
    records = Records((EppRecord("epp", refused),), (SidecarRecord("d-0", running),))
    assert [line[15:] for line in lines("r", records) if " ms  " in line] == [
        "refused    unknown_model, status 404; epp took 1.0 ms",
        "received   by d-0: chat /",
        "decode     on d-0: running, why",
    ]


def test_json_has_every_figure_with_its_source() -> None:
    no_replies = (NoReply("d-1", "no answer within 5 s"),)
    records = Records(
        (EppRecord("epp", DECISION),),
        (SidecarRecord("d-0", SIDECAR_TRACE),),
        no_replies,
        ("epp", "d-1"),
    )
    report = to_json("r", records)
    assert report["silent"] == [{"name": "d-1", "why": "no answer within 5 s"}]
    requests = report["requests"]
    assert isinstance(requests, list)
    assert requests[0]["decision"]["epp"] == "epp"
    assert requests[0]["decision"]["prefill"][1]["in_flight"] == 4
    assert requests[0]["served"][0]["pod"] == "d-0"
    assert requests[0]["served"][0]["legs"][2]["timing"]["transfer"] == 0.125
    assert list(lines("r", records))[-1] == "d-1 did not answer: no answer within 5 s"


def test_the_message_for_an_unknown_id_names_the_components_that_were_asked() -> None:
    records = Records(no_replies=(NoReply("d-1", "refused"),), components=("epp", "d-0", "d-1"))
    message = not_found_message("r", records)
    assert message.startswith(
        "no record of request r (asked: epp, d-0); d-1 did not answer (refused)"
    )
    assert "--history" in message
    assert not_found_message("r", Records()).startswith(
        "no record of request r (asked: no component)"
    )
