"""A stream goes on at its seam: with stop strings, joined events and characters of many tokens."""

import json
from collections.abc import Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.bodies.parse import parse_body
from tandem_sidecar.resume.continuation import Splice, continued, with_ids
from tandem_sidecar.resume.errors import StreamBroken
from tandem_sidecar.resume.ledger import Ledger
from tandem_sidecar.resume.repeated import Lane, Repeated
from tandem_sidecar.resume.rules import stop_strings
from tandem_sidecar.resume.seam import Seam
from tandem_sidecar.resume.whole_tokens import WholeTokens

from .engine import PROMPT, Engine
from .events import event

KINDS = (RequestKind.COMPLETIONS, RequestKind.CHAT)
TEXT = "the keeper 灯台守は sees ships 😀🚀 and the lamp, 灯台"
ENGINES = {
    "bytes": Engine(TEXT),
    "words": Engine(TEXT, sizes=(3, 1, 4, 2)),
    "joined": Engine(TEXT, joined=(1, 3, 2)),
    "all joined": Engine(TEXT, sizes=(2, 1), joined=(3, 2)),
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("kind", [RequestKind.COMPLETIONS, RequestKind.CHAT])
def test_a_stream_goes_on_after_any_event(engine: Engine, kind: RequestKind) -> None:
    body = request(engine, kind, logprobs=1)
    whole = read([*engine.answer(body)])
    for first, second in product(range(len(engine.tokens)), (0, 1, 2, 5)):
        assert read(resumed(engine, body, (first, second))) == whole, (first, second)


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("included", [False, True])
@pytest.mark.parametrize(
    ("kind", "length"),
    [
        *((RequestKind.COMPLETIONS, length) for length in range(2, 13)),
        *((RequestKind.CHAT, length) for length in (2, 7, 12)),
    ],
)
def test_a_stop_string_across_the_seam_stops(
    engine: Engine, included: bool, length: int, kind: RequestKind
) -> None:
    for begin in range(length % 5, len(TEXT) - length, 5):
        stops = [TEXT[begin : begin + length], "~" * (length - 1)]
        body = request(engine, kind, stop=stops, include_stop_str_in_output=included, min_tokens=2)
        events = engine.answer(body)
        whole = read(events)
        assert whole["ends"] == [("stop", stops[0])]
        for before_the_end in range(3, min(len(events), length + 6)):
            cuts = (len(events) - before_the_end, before_the_end % 3)
            assert read(resumed(engine, body, cuts)) == whole, (stops, cuts)


def test_what_a_stop_string_holds_back_is_not_lost() -> None:
    engine = ENGINES["bytes"]
    body = request(engine, stop=["never there"], max_tokens=20)
    whole = read(engine.answer(body))
    assert whole["text"] == TEXT.encode()[:20].decode()
    for cut in range(20):
        assert read(resumed(engine, body, (cut,))) == whole


@pytest.mark.parametrize(
    "other",
    [
        event("lo", [8, 10]),
        event("lO", [8, 9]),
        event("lo!", [8, 9]),
        event("l", [8, 9, 10]),
        event("lo", [8, 9], finish="stop"),
    ],
    ids=["token", "text", "more text", "less text", "end"],
)
def test_another_answer_is_not_sent(other: bytes) -> None:
    lane = Lane()
    lane.set_tokens("text", "lo", [8, 9])
    with pytest.raises(StreamBroken, match="another answer"):
        Repeated({0: lane}).rest(other)


@lru_cache(maxsize=256)
def answer(engine: Engine, data: bytes) -> list[bytes]:
    """The same request is asked again and again, since streams that break at many places go on at
    few."""
    return engine.answer(json.loads(data))


def resumed(engine: Engine, body: dict[str, Any], cuts: Sequence[int]) -> list[bytes]:
    """The events that a client gets if its engines break off after so many."""
    asked = with_ids(parse_body(json.dumps(body).encode()))
    stops, included = stop_strings(asked.members)
    kind, tokens = KINDS["messages" in body], WholeTokens()
    ledger = Ledger(kind, Seam(stops, included=included), tokens, keeps_ids=True)
    sent, current = [], asked
    for cut in (*cuts, None):
        sent += [ledger.take(each) for each in answer(engine, current.data)[:cut]]
        if cut is None or ledger.is_finished:
            break
        if any(sent):
            ledger.begin_again()
            ledger.editor = Splice(ledger)
            rest = continued(kind, asked, ledger)
            assert rest is not None
            current = rest
        else:
            ledger = Ledger(kind, Seam(stops, included=included), tokens, keeps_ids=True)
    if not ledger.is_done:
        sent += engine.answer(body)[-2:]
    return sent


def request(
    engine: Engine, kind: RequestKind = RequestKind.COMPLETIONS, **more: Any
) -> dict[str, Any]:
    prompt = {"prompt": list(PROMPT)} if kind is RequestKind.COMPLETIONS else {"messages": []}
    return {**prompt, "max_tokens": len(engine.tokens), "temperature": 0, **more}


def read(events: Sequence[bytes]) -> dict[str, Any]:
    """What a client reads in a stream."""
    lines = [line.removeprefix("data: ") for line in b"".join(events).decode().split("\n\n")]
    chunks = [json.loads(line) for line in lines if line not in {"", "[DONE]"}]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    logprobs = [choice["logprobs"] or {} for choice in choices]
    return {
        "text": "".join(c["text"] if "text" in c else c["delta"]["content"] for c in choices),
        "ids": [i for choice in choices for i in choice.get("token_ids", ())],
        "prompts": [
            ids for each in (*choices, *chunks) if (ids := each.get("prompt_token_ids")) is not None
        ],
        "ends": [(c["finish_reason"], c["stop_reason"]) for c in choices if c["finish_reason"]],
        "roles": [role for c in choices if (role := c.get("delta", {}).get("role"))],
        "entries": [each for of in logprobs for each in of.get("content", ())],
        "offsets": [each for of in logprobs for each in of.get("text_offset", ())],
        "tokens": [each for of in logprobs for each in of.get("tokens", ())],
        "usage": chunks[-1]["usage"],
        "id": {chunk["id"] for chunk in chunks},
    }
