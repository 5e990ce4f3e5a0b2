"""Events that are none of their API's: each breaks the stream at most, and nothing else."""

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.bodies.parse import parse_body
from tandem_sidecar.observability.record import Record
from tandem_sidecar.resume.errors import StreamBroken
from tandem_sidecar.resume.kept_stream import KeptStream
from tandem_sidecar.resume.parsed_rest import NotContinued, ParsedRest
from tandem_sidecar.resume.whole_events import MALFORMED

from . import answers, engine
from .answers import TOOL, Json
from .events import DONE, chat_event, event, ledger, role_event
from .test_again import FIRST, kept_stream, take

OTHER = answers.Engine("other", (2, 1, 3))
WRONG = [None, -1, "x", [], {}, [1], 10**30]
CASES: list[tuple[RequestKind, Json]] = [
    (RequestKind.COMPLETIONS, {"stream_options": {"include_usage": True}}),
    (RequestKind.COMPLETIONS, {"presence_penalty": 1, "logprobs": True, "n": 2}),
    (RequestKind.CHAT, {"return_token_ids": True, "stream_options": {"include_usage": True}}),
    (RequestKind.CHAT, {"tools": [TOOL], "presence_penalty": 1}),
    (RequestKind.MESSAGES, {"tools": [TOOL]}),
    (RequestKind.RESPONSES, {"tools": [TOOL]}),
]


def wrong_values(value: Any) -> Iterator[Any]:
    """The value with another, or none, in each place."""
    yield from WRONG
    if isinstance(value, dict):
        for name, each in value.items():
            yield {other: kept for other, kept in value.items() if other != name}
            for wrong in wrong_values(each):
                yield {**value, name: wrong}
    elif isinstance(value, list):
        for place, each in enumerate(value):
            for wrong in wrong_values(each):
                yield [*value[:place], wrong, *value[place + 1 :]]


def wrong_events(event: bytes) -> Iterator[bytes]:
    head, separator, data = event.rpartition(b"data: ")
    if data == DONE.removeprefix(b"data: "):
        return
    value = msgspec.json.decode(data)
    for wrong in wrong_values(value):
        yield head + separator + json.dumps(wrong, separators=(",", ":")).encode() + b"\n\n"
    for cut in (1, len(data) // 2, len(data) - 3):
        yield head + separator + data[:cut].rstrip() + b"\n\n"
    yield head + separator + data.replace(b'"', b"\xff", 1)


def shapes(events: list[bytes]) -> list[int]:
    """Places of events, one of each shape."""
    places: dict[str, int] = {}
    for place, each in enumerate(events):
        data = each.rpartition(b"data: ")[2]
        if data.startswith(b"{"):
            places.setdefault(_shape(msgspec.json.decode(data)), place)
    return [*places.values()]


def _shape(value: Any) -> str:
    if isinstance(value, dict):
        return str({name: value[name] if name == "type" else _shape(value[name]) for name in value})
    if isinstance(value, list):
        return str([_shape(each) for each in value])
    return type(value).__name__


def read_wrong(kept: KeptStream, wrong: bytes) -> None:
    """Read it, and ask for all that may be asked after it."""
    try:
        take(kept, [wrong], [])
    except StreamBroken as err:
        assert err.before == b""  # noqa: PT017 - most events raise nothing
    kept.missing_end()
    kept.move_by_ids()
    kept.move()


def begun(kind: RequestKind, body: Json) -> KeptStream:
    kept = kept_stream(kind, body, Record("r", kind, 0.0, 0.0), 1e9)
    assert kept is not None
    return kept


@pytest.mark.parametrize(("kind", "body"), CASES)
async def test_an_event_that_cannot_be_read_breaks_the_stream_at_most(
    kind: RequestKind, body: Json
) -> None:
    body = {"temperature": 0, **body}
    first = FIRST.answer(kind, begun(kind, body).asked.data)
    for place in shapes(first):
        for wrong in wrong_events(first[place]):
            kept = begun(kind, body)
            take(kept, first[:place], [])
            read_wrong(kept, wrong)


@pytest.mark.parametrize(("kind", "body"), CASES)
async def test_so_does_one_of_the_next_engine(kind: RequestKind, body: Json) -> None:
    body, cut = {"temperature": 0, **body}, 4
    kept = begun(kind, body)
    first = FIRST.answer(kind, kept.asked.data)[:cut]
    take(kept, first, [])
    rest = kept.move()
    assert rest is not None
    other = OTHER.answer(kind, rest.data)
    for place in shapes(other):
        for wrong in wrong_events(other[place]):
            kept = begun(kind, body)
            take(kept, first, [])
            assert kept.move() is not None
            take(kept, other[:place], [])
            read_wrong(kept, wrong)


LOGPROBS = {"logprobs": 1, "stop": ["zz"], "max_tokens": 12, "temperature": 0}


async def test_so_do_places_in_the_text_that_are_none() -> None:
    kind = RequestKind.COMPLETIONS
    made = engine.Engine("The lamp is lit", joined=(2, 1))
    body = {**LOGPROBS, "prompt": list(engine.PROMPT)}
    first = made.answer(body | {"return_token_ids": True})
    for after in (2, 3):
        for wrong in wrong_events(first[after]):
            kept = begun(kind, body)
            take(kept, first[:after], [])
            read_wrong(kept, wrong)
        for wrong in wrong_events(first[after + 1]):
            kept = begun(kind, body)
            take(kept, first[:after], [])
            rest = kept.move()
            assert rest is not None
            other = made.answer(msgspec.json.decode(rest.data))
            take(kept, other[:1], [])
            read_wrong(kept, wrong)


@pytest.mark.parametrize("ids", [b"x", b"1.5", b"-1", b"5000000000", b"7,x", b"7,-1"])
async def test_ids_that_are_no_numbers_break_the_stream(ids: bytes) -> None:
    """Also where all else is as in the events before."""
    kept = begun(RequestKind.COMPLETIONS, {})
    prompt = list(answers.PROMPT)
    events = [event("a", [5], prompt), *(event("b", [number]) for number in (7, 8, 9))]
    take(kept, events, [])
    wrong = event("c", [10]).replace(b'"token_ids":[10]', b'"token_ids":[%b]' % ids)
    with pytest.raises(StreamBroken, match="cannot be read"):
        kept.read(wrong, last=False)
    rest = kept.move()
    assert rest is not None
    assert msgspec.json.decode(rest.data)["prompt"] == [*prompt, 5, 7, 8, 9]


async def test_a_usage_that_is_null_is_none() -> None:
    """Some engines write it in each event."""
    kept = begun(RequestKind.COMPLETIONS, {})
    prompt = list(answers.PROMPT)
    take(kept, [event("a", [5], prompt), event("b", [6])], [])
    assert kept.move() is not None
    with_usage = event("c", [7], id="cmpl-other").replace(b',"choices"', b',"usage":null,"choices"')
    assert b'"usage":null' in kept.read(with_usage, last=False)


RENDERED: Json = {
    "token_ids": [1],
    "features": None,
    "sampling_params": {"max_tokens": 9, "min_tokens": 1, "skip_special_tokens": False},
}
TOKENS: Json = {
    "choices": [{"index": 0, "token_ids": [3], "finish_reason": "stop", "stop_reason": 3}],
    "usage": {
        "prompt_tokens": 2,
        "completion_tokens": 1,
        "prompt_tokens_details": {"cached_tokens": 1},
    },
}
READ: Json = {
    "chunk": {
        "choices": [
            {
                "index": 0,
                "delta": {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
            }
        ]
    },
    "stream_state": {"tools_streamed": True},
}


def parsed_rest() -> ParsedRest:
    record = ledger(RequestKind.CHAT)
    record.take(role_event([1]) + chat_event("a", [2]))
    record.begin_parsed()
    asked = parse_body(b'{"messages":[],"model":"m"}')
    return ParsedRest(asked, record, usage=True, continuous=True)


def test_a_rendered_chat_that_cannot_be_read_is_not_continued() -> None:
    assert parsed_rest().generation(msgspec.json.encode(RENDERED))
    for wrong in wrong_values(RENDERED):
        with contextlib.suppress(NotContinued, *MALFORMED):
            parsed_rest().generation(json.dumps(wrong).encode())


def test_tokens_that_cannot_be_read_break_the_stream() -> None:
    for wrong in [TOKENS, *wrong_values(TOKENS)]:
        rest = parsed_rest()
        with contextlib.suppress(StreamBroken):
            rest.take(b"data: " + json.dumps(wrong).encode() + b"\n\n")
        if rest.next_parse() is not None:
            assert rest.events(msgspec.json.encode(READ))
        with contextlib.suppress(StreamBroken):
            rest.take(DONE)
        rest.end()


def test_parsed_tokens_that_cannot_be_read_are_malformed() -> None:
    for wrong in [READ, *wrong_values(READ)]:
        rest = parsed_rest()
        rest.take(2 * (b"data: " + msgspec.json.encode(TOKENS) + b"\n\n"))
        assert rest.next_parse()
        with contextlib.suppress(*MALFORMED):
            rest.events(json.dumps(wrong).encode())
            # Its state is sent with the next tokens.
            assert rest.next_parse()
