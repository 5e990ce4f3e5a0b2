"""The history of one request, joined from the records of EPPs and sidecars. Pure.

    records ──join──► one RequestHistory for each use of the id ──lines, to_json──► output

Clients may use an id several times, and a client whose connection broke may send its request again
with the same id. A sidecar's record belongs to the latest decision before it that named the
sidecar's pod; if there is none (the EPP did not answer), the record stands alone. A router decides
again for a request whose engine failed: those decisions belong to its record, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, NamedTuple

import msgspec

from tandem_contract.timing import UNKNOWN, Timing
from tandem_contract.trace import (
    CandidateTrace,
    DecisionTrace,
    LegTrace,
    MoveTrace,
    SidecarTrace,
)

from .cost_lines import cost_lines, first_token, seconds

REASONS: Final[Mapping[str, str]] = {
    "worth_it": "a prefill pod computes the prompt, and the KV transfer is worth it",
    "cached": "the decode pod has the KV of the prompt already, up to its end",
    "stored": "the decode pod loads the KV of the prompt from external storage, up to its end",
    "cheaper_here": "one pod costs less than any pair of a prefill and a decode pod",
    "transfer_too_long": "the KV transfer would take more than half as long as computing it here",
    "not_disaggregated": "no pod may prefill for this one",
    "split_off": "the configuration turns splitting off (routing.split, or plugins)",
    "short_prompt": "the prompt has fewer than nonCachedTokens tokens",
    "mostly_cached": "fewer than nonCachedTokens tokens of the prompt are not cached",
    "always": "the configuration splits each request that may be split (routing.split, or plugins)",
    "prefill_limit": "more of the prompt is not cached than a decode pod may prefill"
    " (routing.maxPrefillOnDecode)",
    "no_prefill_backend": "it was to be split, but no pod that could prefill for it is ready",
    "no_decode_backend": "no decode pod is ready",
    "fault": "the EPP could not choose because of a bug, which its log shows: any pod serves it",
    "pooling": "the request generates nothing: one pod computes its prompts",
    "passthrough": "the EPP does not read requests of this kind",
}
"""Reason, a label of `tandem_epp_decisions_total` → why the path was taken, as in the list of
`docs/operate/troubleshooting.md`. The reasons for which one engine must serve a request alone are
in `tandem_contract.single_engine`."""
_MAX_CLOCK_SKEW: Final = 1.0
"""Seconds by which the clocks of two nodes may differ."""


class EppRecord(NamedTuple):
    """A decision, and the EPP that made it."""

    epp: str
    trace: DecisionTrace


class SidecarRecord(NamedTuple):
    """The trace of a request from one decode pod's sidecar."""

    pod: str
    trace: SidecarTrace


class NoReply(NamedTuple):
    """A component that was asked and did not answer."""

    name: str
    why: str


@dataclass(frozen=True)
class Records:
    """The answers of all components that were asked."""

    decisions: tuple[EppRecord, ...] = ()
    sidecar_records: tuple[SidecarRecord, ...] = ()
    no_replies: tuple[NoReply, ...] = ()
    components: tuple[str, ...] = ()
    """Names of all components that were asked, including those that did not answer."""


@dataclass(frozen=True)
class RequestHistory:
    """One request: its decision, and the records of the pods that served it."""

    decision: EppRecord | None
    sidecar_records: tuple[SidecarRecord, ...]
    moves: tuple[EppRecord, ...] = ()
    """The decisions to which engines it moved."""

    @property
    def started(self) -> float:
        """Unix seconds by the EPP's clock, or by the sidecar's if there is no decision."""
        return (
            self.decision.trace.decided if self.decision else self.sidecar_records[0].trace.received
        )


def join(records: Records) -> tuple[RequestHistory, ...]:
    """The requests that used the id, the oldest first."""
    # Sorted, so that the last match is the latest decision before the record.
    decisions = sorted(records.decisions, key=lambda record: record.trace.decided)
    # Index of the decision → the sidecars' records that belong to it.
    records_of_decision: dict[int, list[SidecarRecord]] = {}
    without_decision = []
    for record in sorted(records.sidecar_records, key=lambda r: r.trace.received):
        matches = [i for i, decision in enumerate(decisions) if _follows(record, decision)]
        if record.trace.moves:
            # Where it moved to may be an alternative of the decision, and the other way round.
            matches = [i for i in matches if _is_choice(decisions[i], record.pod)] or matches
        # The latest one: a request that is sent again with its id has a decision of its own.
        if matches:
            records_of_decision.setdefault(matches[-1], []).append(record)
        else:
            without_decision.append(RequestHistory(None, (record,)))
    others = [i for i in range(len(decisions)) if i not in records_of_decision]
    # Index of the decision → those of the moves of its request.
    moves_of_decision = {
        i: [other for other in others if _is_move(decisions[other], of_decision)]
        for i, of_decision in records_of_decision.items()
    }
    moves = {i for of_decision in moves_of_decision.values() for i in of_decision}
    with_decision = [
        RequestHistory(
            decision,
            tuple(records_of_decision.get(i, ())),
            tuple(decisions[move] for move in moves_of_decision.get(i, ())),
        )
        for i, decision in enumerate(decisions)
        if i not in moves
    ]
    return tuple(sorted([*with_decision, *without_decision], key=lambda history: history.started))


def to_json(request_id: str, records: Records) -> dict[str, object]:
    """`{request_id, requests: [{decision, served, moves}], silent}`, each record with its source;
    `moves`: the later decisions of a request that moved."""
    return {
        "request_id": request_id,
        "requests": [
            {
                "decision": _with_source("epp", *history.decision) if history.decision else None,
                "served": [_with_source("pod", *record) for record in history.sidecar_records],
                "moves": [_with_source("epp", *decision) for decision in history.moves],
            }
            for history in join(records)
        ],
        "silent": [no_reply._asdict() for no_reply in records.no_replies],
    }


def lines(request_id: str, records: Records) -> Iterator[str]:
    """The history as text: one line for each event, with the milliseconds since the first."""
    histories = join(records)
    for i, history in enumerate(histories, 1):
        number = f" ({i} of {len(histories)})" if len(histories) > 1 else ""
        when = datetime.fromtimestamp(history.started, UTC).isoformat(" ", "milliseconds")
        yield f"Request {request_id}{number}, {when}"
        # By time only: the sort is stable, so events of the same moment keep their order.
        for at, text in sorted(_events(history), key=lambda event: event[0]):
            yield f"{at * 1000:10.1f} ms  {text}"
        yield ""
    for no_reply in records.no_replies:
        yield f"{no_reply.name} did not answer: {no_reply.why}"


def not_found_message(request_id: str, records: Records) -> str:
    """Why there is no history to show."""
    unanswered = {no_reply.name for no_reply in records.no_replies}
    responders = [name for name in records.components if name not in unanswered]
    parts = [
        f"no record of request {request_id} (asked: {', '.join(responders) or 'no component'})"
    ]
    parts += [f"{no_reply.name} did not answer ({no_reply.why})" for no_reply in records.no_replies]
    return (
        "; ".join(parts)
        + ". The id is in the response header x-request-id. EPPs and sidecars each "
        "keep their latest requests (--history) for as long as they run."
    )


Event = tuple[float, str]
"""Seconds after the request's start, and a description."""


def _follows(record: SidecarRecord, decision: EppRecord) -> bool:
    """Whether the record may be the consequence of the decision."""
    decode_pods = {candidate.name for candidate in decision.trace.decode}
    # A record that seems to precede its decision by less than the skew may still follow it.
    is_later = decision.trace.decided <= record.trace.received + _MAX_CLOCK_SKEW
    return is_later and record.pod in decode_pods


def _is_move(decision: EppRecord, records: Sequence[SidecarRecord]) -> bool:
    """Whether a request with these records moved by the decision."""
    return any(
        abs(record.trace.received + move.at - decision.trace.decided) <= _MAX_CLOCK_SKEW
        and _is_choice(decision, move.target)
        for record in records
        for move in record.trace.moves
    )


def _is_choice(decision: EppRecord, pod: str) -> bool:
    """Whether the decision is for this pod."""
    return bool(decision.trace.decode) and decision.trace.decode[0].name == pod


def _events(history: RequestHistory) -> Iterator[Event]:
    plan = None
    if history.decision is not None:
        plan = history.decision.trace
        yield from _decision_events(history.decision)
    for decision in history.moves:
        start = decision.trace.decided - history.started
        yield from ((start + at, text) for at, text in _decision_events(decision))
    for record in history.sidecar_records:
        # A record never stands before its decision, even if the clocks of the nodes differ.
        yield from _sidecar_events(record, max(0.0, record.trace.received - history.started), plan)


def _request_lines(trace: DecisionTrace) -> Iterator[str]:
    """What objects of the cluster say of the request."""
    if trace.asked:
        yield f"  model    {trace.model}, which the client called {trace.asked}"
    if trace.priority:
        yield f"  priority {trace.priority}"


def _decision_events(decision: EppRecord) -> Iterator[Event]:
    trace = decision.trace
    duration = f"{decision.epp} took {seconds(trace.decision_seconds)}"
    if trace.held:
        duration += f", after {seconds(trace.held)} of waiting for room"
    if trace.path is None:
        yield 0.0, f"refused    {trace.reason}, status {trace.status}; {duration}"
        return
    yield 0.0, f"decided    {trace.path} ({trace.reason}): {_prompt(trace)}; {duration}"
    if reason := REASONS.get(trace.reason):
        yield 0.0, f"  because  {reason}"
    for line in _request_lines(trace):
        yield 0.0, line
    for phase, ranked in (("decode", trace.decode), ("prefill", trace.prefill)):
        if ranked:
            others = [f"then {candidate.name}" for candidate in ranked[1:]]
            yield 0.0, f"  {phase:8} {', '.join((_candidate(ranked[0]), *others))}"
    for line in cost_lines(trace.costs):
        yield 0.0, line
    if line := first_token(trace):
        # A prediction without a measurement belongs to the costs that it follows from.
        yield trace.measured_ttft or 0.0, line
    if trace.ended is not None:
        served = f" from {trace.served}" if trace.served else ""
        head = f"status {trace.status}" if trace.status is not None else "no answer"
        line = f"closed     {head}{served}, as {decision.epp} saw it"
        yield trace.ended, line + _timing(trace.timing)


def _prompt(trace: DecisionTrace) -> str:
    if not trace.prompt_tokens:
        return "prompt not read"
    pod = trace.decode[0].name if trace.decode else "the decode pod"
    text = f"about {trace.prompt_tokens} prompt tokens, {trace.cached_tokens} cached on {pod}"
    if trace.loaded_tokens:
        text += f", {trace.loaded_tokens} loaded from storage"
    return f"{text} (tier {trace.tier})" if trace.tier else text


def _sidecar_events(
    record: SidecarRecord, at: float, plan: DecisionTrace | None
) -> Iterator[Event]:
    """`plan` is the decision that the sidecar followed."""
    trace = record.trace
    yield at, f"received   by {record.pod}: {trace.kind} {trace.target}"
    # A move and the first leg after it begin at the same moment.
    for move in trace.moves:
        yield at + move.at, _move(move)
    for leg in trace.legs:
        yield at + leg.started, _leg(leg)
        if line := _transfer_bound(leg, trace.legs):
            yield at + leg.started, line
    if trace.first_byte is not None:
        yield at + trace.first_byte, "first byte to the client"
    if trace.ended is not None:
        status = f"status {trace.status}" if trace.status is not None else "no status"
        # The plan's reason stands above, and does not explain a path that the plan did not have.
        reason = f" ({trace.reason})" if plan is None or trace.reason != plan.reason else ""
        path = f", {trace.path}{reason}" if trace.path else ""
        yield at + trace.ended, f"ended      {trace.outcome}, {status}{path}"


def _move(move: MoveTrace) -> str:
    source = f"from {move.source} ({move.cause})" if move.source else f"({move.cause})"
    if not move.target:
        return f"not moved  {source}: {move.why}"
    parts = [_how(move), move.result or "no answer yet"]
    if move.gap is not None:
        parts.append(f"the client waited {seconds(move.gap)}")
    if move.recomputed:
        parts.append(f"{move.recomputed} tokens to compute once more")
    return f"moved      {source} to {move.target}: {', '.join(parts)}"


def _how(move: MoveTrace) -> str:
    """How the next engine goes on, and where the seam is."""
    if move.method == "continued":
        repeated = move.delivered - move.seam
        more = f", {repeated} of them generated again" if repeated else ""
        return f"continued after {move.delivered} tokens{more}"
    if move.method == "again":
        return f"generated again, {move.delivered} tokens of which the client had"
    return "begun again, as the client had nothing of it"


def _leg(leg: LegTrace) -> str:
    if leg.ended is None:
        result = "running"
    else:
        result = f"{leg.result or 'ended'} after {seconds(leg.ended - leg.started)}"
    parts = [result]
    if leg.status is not None:
        parts.append(f"status {leg.status}")
    # A prefill answers in one piece: its first byte says no more than its end.
    if leg.first_byte is not None and leg.phase != "prefill":
        parts.append(f"first byte after {seconds(leg.first_byte - leg.started)}")
    if leg.streamed:
        parts.append("read KV while the prefill computed it")
    if leg.detail:
        parts.append(leg.detail)
    return f"{leg.phase:10} on {leg.backend}: {', '.join(parts)}{_timing(leg.timing)}"


def _transfer_bound(leg: LegTrace, legs: Sequence[LegTrace]) -> str:
    """What is known of a KV transfer of which the engine reports no time: vLLM counts its transfers
    together. Empty if there was none, or its time is known."""
    timing = leg.timing or UNKNOWN
    reports_times = any(t is not None for t in (timing.queue, timing.compute, timing.transfer))
    has_kv = any(
        other.phase == "prefill" and other.result == "answered" and other.engine_id == leg.engine_id
        for other in legs
    )
    if leg.phase != "decode" or not has_kv or leg.first_byte is None or reports_times:
        return ""
    most = seconds(leg.first_byte - leg.started)
    return (
        f"  KV transfer, not reported by the engine: at most {most}, from the hand-off to the first"
        " byte of the answer"
    )


def _timing(timing: Timing | None) -> str:
    """The engine's own figures, in brackets; empty without any."""
    if timing is None:
        return ""
    times = {
        "leg": timing.leg,
        "queue": timing.queue,
        "compute": timing.compute,
        "KV transfer": timing.transfer,
    }
    computed = timing.computed
    if computed is not None:
        # vLLM counts a prompt of which all KV came as cached, yet computes its last token for the
        # logits, as every leg does.
        computed = max(1, computed)
    counts = {
        "KV bytes": timing.bytes,
        "prompt tokens": timing.prompt,
        "tokens computed": computed,
        "tokens cached": timing.cached,
        "other prompts in flight": timing.inflight or None,
    }
    figures = [f"{name} {seconds(value)}" for name, value in times.items() if value is not None]
    figures += [f"{name} {count}" for name, count in counts.items() if count is not None]
    return f" [{', '.join(figures)}]" if figures else ""


def _candidate(candidate: CandidateTrace) -> str:
    parts = [f"{candidate.in_flight} in flight"]
    if candidate.waiting is not None:
        parts.append(f"{candidate.waiting:.0f} waiting")
    if candidate.kv_usage is not None:
        parts.append(f"{candidate.kv_usage:.0%} of its KV cache in use")
    return f"{candidate.name} ({', '.join(parts)})"


def _with_source(key: str, name: str, trace: DecisionTrace | SidecarTrace) -> dict[str, object]:
    return {key: name, **msgspec.to_builtins(trace)}
