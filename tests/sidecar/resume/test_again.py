"""Each feature of each API: what another engine does with a stream that breaks off."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_http1.client import ActiveRequest, ClientConnection, Limits
from tandem_http1.messages import Request
from tandem_http1.server import Server
from tandem_sidecar.bodies.parse import Body, parse_body
from tandem_sidecar.observability.record import Record
from tandem_sidecar.resume.errors import StreamBroken
from tandem_sidecar.resume.kept_stream import KeptStream, keep
from tandem_sidecar.resume.rules import ANY, FIELDS, ONCE, PARSED, Method
from tandem_sidecar.resume.transcript import Transcript
from tandem_sidecar.resume.whole_tokens import Vocabularies

from .answers import PROMPT, TOOL, Engine, Json, comparable, read
from .events import DONE

KINDS = [kind for kind in RequestKind if kind is not RequestKind.GENERATE]
FIRST = Engine("first")
OTHERS = [Engine("other"), Engine("other", joined=(2, 1, 3))]
BASE: dict[RequestKind, Json] = {
    RequestKind.COMPLETIONS: {"prompt": PROMPT},
    RequestKind.CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    RequestKind.MESSAGES: {"messages": [{"role": "user", "content": "hi"}]},
    RequestKind.RESPONSES: {"input": "hi"},
}
SAMPLES: dict[str, list[Any]] = {
    "background": [True],
    "bad_words": [["x"]],
    "best_of": [2],
    "echo": [True],
    "frequency_penalty": [0.5],
    "include_reasoning": [False],
    "logprobs": [True],
    "max_completion_tokens": [50],
    "max_tokens": [50],
    "messages": [
        [{"role": "user", "content": "please think"}],
        [{"role": "user", "content": [{"type": "image_url"}]}],
    ],
    "min_tokens": [2],
    "n": [2],
    "presence_penalty": [0.5],
    "prompt": [PROMPT, "text", ["several", "prompts"], [[1], [2]]],
    "response_format": [{"type": "json_schema", "json_schema": {}}],
    "return_token_ids": [True],
    "seed": [3],
    "stop": ["z"],
    "stream_options": [{"include_usage": True}],
    "tool_choice": ["required", {"type": "function", "function": {"name": "weather"}}],
    "tools": [[TOOL]],
    "a_field_of_tomorrow": [1],
}
"""Values of a field beside those of the table; of the others `x`."""
MEDIA_OR_PARSED = ("image_url", "think")


def cells(kind: RequestKind) -> Iterator[tuple[str, Any, Method]]:
    """Each field of an API, with values of both kinds: those of a column of the table."""
    fields, once = FIELDS.get(kind, {}), ONCE[kind]
    for name in [*fields, *once, *SAMPLES]:
        if name in {"stream", "temperature"}:
            continue
        allowed = fields.get(name, ())
        if isinstance(allowed, tuple):
            for value in allowed:
                yield name, value, Method.CONTINUED
        method = Method.CONTINUED if allowed is ANY else Method.AGAIN
        for value in SAMPLES.get(name, ["x"]):
            of_value = Method.NO if name in once and value not in once[name] else method
            if name == "prompt" and isinstance(value, list) and not isinstance(value[0], int):
                of_value = Method.AGAIN
            if any(word in json.dumps(value) for word in MEDIA_OR_PARSED):
                of_value = Method.AGAIN
            if kind is RequestKind.CHAT and name in PARSED:
                of_value = Method.PARSED
            yield name, value, of_value


@dataclass
class Resumed:
    """What a client got, and what the other engine was asked for; `why`: nothing."""

    sent: list[bytes]
    asked: bytes = b""
    why: str = ""


def resumed(
    kind: RequestKind,
    body: Json,
    cut: int,
    other: Engine = OTHERS[0],
    *,
    first: Engine = FIRST,
    most: float = 1e9,
) -> Resumed:
    """The stream whose first engine dies after `cut` events."""
    record = Record("r", kind, 0.0, 0.0)
    kept = kept_stream(kind, body, record, most)
    if kept is None:
        return Resumed([], why=record.not_resumed)
    sent: list[bytes] = []
    take(kept, first.answer(kind, kept.asked.data)[:cut], sent)
    rest = move(kept)
    if rest is not None:
        take(kept, other.answer(kind, rest.data), sent)
        return Resumed(sent, asked=rest.data)
    end = kept.missing_end()
    return Resumed([*sent, end or b""], why="" if end else record.not_resumed)


def move(kept: KeptStream) -> Body | None:
    """What an engine is sent that does not parse tokens."""
    rest = kept.move()
    return rest if kept.rest is None else kept.refuse_rest("it does not parse tokens")


def take(kept: KeptStream, events: list[bytes], sent: list[bytes]) -> None:
    for event in events:
        sent.append(kept.read(event, last=False))
        kept.written = kept.written or bool(sent[-1])


def kept_stream(kind: RequestKind, body: Json, record: Record, most: float) -> KeptStream | None:
    data = json.dumps({**BASE[kind], "stream": True, "model": "m", **body}).encode()
    request = Request(b"POST", b"/", [], {}, data, http10=False, keep_alive=True)
    return keep(
        ClientConnection(Server(NoHandler(), Limits()).clients),
        request,
        kind,
        parse_body(data),
        record=record,
        vocabularies=Vocabularies(),
        max_regeneration=most,
    )


class NoHandler:
    """No request arrives."""

    def refuse(self, request: Request) -> bytes:
        raise AssertionError(request)

    def handle(self, request: Request, client: ClientConnection) -> ActiveRequest | None:
        raise AssertionError(request, client)


def whole(kind: RequestKind, body: Json) -> Json:
    """What the client reads of a stream that does not break off."""
    record = Record("r", kind, 0.0, 0.0)
    kept = kept_stream(kind, body, record, 1e9)
    assert kept is not None
    sent: list[bytes] = []
    take(kept, FIRST.answer(kind, kept.asked.data), sent)
    return read(sent)


@pytest.mark.parametrize("other", OTHERS, ids=["alike", "joined"])
@pytest.mark.parametrize("kind", KINDS)
async def test_every_cell_of_the_table(kind: RequestKind, other: Engine) -> None:
    for name, value, method in cells(kind):
        case = name, value, method
        body = {"temperature": 0, name: value}
        if method is Method.NO:
            assert name in resumed(kind, body, 5).why, case
            continue
        expected, events = whole(kind, body), len(FIRST.answer(kind, data_of(kind, body)))
        for cut in range(1, events):
            got = resumed(kind, body, cut, other)
            assert not got.why, (*case, cut)
            assert comparable(read(got.sent)) == comparable(expected), (*case, cut)
            if got.asked and cut > 2:
                is_again = json.loads(got.asked) == json.loads(data_of(kind, body))
                assert is_again == (method is not Method.CONTINUED), (*case, cut)


@pytest.mark.parametrize("kind", KINDS)
async def test_what_is_drawn_without_a_seed_is_not_generated_again(kind: RequestKind) -> None:
    for name, value, method in cells(kind):
        got = resumed(kind, {name: value}, 5)
        if method is Method.CONTINUED:
            assert not got.why, (name, value)
        elif name == "seed" and kind in {RequestKind.COMPLETIONS, RequestKind.CHAT}:
            assert not got.why
        else:
            assert got.why, (name, value)
            assert "another" not in got.why, (name, value)


def data_of(kind: RequestKind, body: Json) -> bytes:
    return json.dumps({**BASE[kind], "stream": True, "model": "m", **body}).encode()


async def test_which_streams_have_an_event_for_each_token() -> None:
    """Of those alone a token can be late: in others a parser may hold the text back."""
    kind = RequestKind.COMPLETIONS
    for body, is_known in (({}, True), ({"presence_penalty": 1, "temperature": 0}, False)):
        kept = kept_stream(kind, body, Record("r", kind, 0.0, 0.0), 1e9)
        assert kept is not None
        assert not kept.has_token_events
        take(kept, FIRST.answer(kind, kept.asked.data)[:3], [])
        assert kept.has_token_events == is_known
    kept = kept_stream(kind, {}, Record("r", kind, 0.0, 0.0), 1e9)
    assert kept is not None
    # The engine does not do as it was asked.
    take(kept, FIRST.answer(kind, data_of(kind, {"presence_penalty": 1}))[:3], [])
    assert not kept.has_token_events


FAILURES: list[tuple[RequestKind, Json]] = [
    (RequestKind.MESSAGES, {"type": "error", "error": {"message": "the core died"}}),
    (RequestKind.MESSAGES, {"type": "message_delta", "delta": {"stop_reason": None}}),
    (RequestKind.RESPONSES, {"type": "error", "message": "the core died"}),
    (RequestKind.RESPONSES, {"type": "response.failed", "response": {"status": "failed"}}),
    (RequestKind.RESPONSES, {"type": "response.completed", "response": {"status": "cancelled"}}),
]


@pytest.mark.parametrize(("kind", "failure"), FAILURES)
async def test_a_stream_whose_engine_says_that_it_failed_goes_on(
    kind: RequestKind, failure: Json
) -> None:
    kept = kept_stream(kind, {"temperature": 0}, Record("r", kind, 0.0, 0.0), 1e9)
    assert kept is not None
    sent: list[bytes] = []
    take(kept, FIRST.answer(kind, kept.asked.data)[:5], sent)
    event = f"event: {failure['type']}\ndata: {json.dumps(failure)}\n\n".encode()
    with pytest.raises(StreamBroken):
        kept.read(event, last=False)
    rest = kept.move()
    assert rest is not None
    take(kept, OTHERS[0].answer(kind, rest.data), sent)
    assert comparable(read(sent)) == comparable(whole(kind, {"temperature": 0}))


AGAIN: list[tuple[RequestKind, Json]] = [
    (RequestKind.COMPLETIONS, {"presence_penalty": 1, "return_token_ids": True}),
    (RequestKind.COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "seed": 1, "logprobs": True}),
    (RequestKind.CHAT, {"messages": [{"role": "user", "content": "think"}], "tools": [TOOL]}),
    (RequestKind.CHAT, {"messages": [{"role": "user", "content": "think"}], "tools": []}),
    (RequestKind.CHAT, {"n": 2, "logprobs": True, "stream_options": {"include_usage": True}}),
    (RequestKind.MESSAGES, {"system": "think", "tools": [TOOL]}),
    (RequestKind.RESPONSES, {"instructions": "think", "tools": [TOOL]}),
]


@pytest.mark.parametrize(("kind", "body"), AGAIN)
async def test_a_stream_survives_two_engines(kind: RequestKind, body: Json) -> None:
    body = {"temperature": 0, **body}
    expected = comparable(whole(kind, body))
    events = len(FIRST.answer(kind, data_of(kind, body)))
    for cut in range(1, events):
        for second in range(cut, events):
            record = Record("r", kind, 0.0, 0.0)
            kept = kept_stream(kind, body, record, 1e9)
            assert kept is not None
            sent: list[bytes] = []
            take(kept, FIRST.answer(kind, kept.asked.data)[:cut], sent)
            for engine, number in ((OTHERS[0], second), (OTHERS[1], events)):
                rest = move(kept)
                assert rest is not None
                take(kept, engine.answer(kind, rest.data)[:number], sent)
            assert comparable(read(sent)) == expected, (cut, second)


@pytest.mark.parametrize("joined", [(1,), (2, 1, 3)])
@pytest.mark.parametrize(("kind", "body"), AGAIN)
async def test_another_answer_ends_the_stream(
    kind: RequestKind, body: Json, joined: tuple[int, ...]
) -> None:
    body = {"temperature": 0, **body}
    events = FIRST.answer(kind, data_of(kind, body))
    for token in range(3):
        other = Engine("other", joined, other=token)
        for cut in range(1, len(events)):
            difference = ""
            got = None
            try:
                got = read(resumed(kind, body, cut, other).sent)
            except StreamBroken as err:
                difference = str(err)
            if got is None:
                assert "another answer" in difference
                continue
            # What differs came after what the client had.
            assert "other" in str(got)
            for name, value in read(events[:cut]).items():
                if isinstance(value, str) and not name.startswith("response"):
                    assert got[name].startswith(value)


async def test_only_what_is_generated_soon_is_generated_again() -> None:
    body = {"temperature": 0, "presence_penalty": 1}
    assert not resumed(RequestKind.COMPLETIONS, body, 2, most=1e9).why
    why = resumed(RequestKind.COMPLETIONS, body, 4, most=-1.0).why
    assert "to generate again what was sent would take" in why


def test_the_time_is_the_longest_of_the_engines() -> None:
    now = [0.0]
    transcript = Transcript(RequestKind.COMPLETIONS, clock=lambda: now[0])
    events = FIRST.answer(RequestKind.COMPLETIONS, data_of(RequestKind.COMPLETIONS, {}))
    for event in events[:3]:
        transcript.take(event)
        now[0] += 1.5
    assert transcript.seconds == 3.0
    transcript.begin_again()
    now[0] += 100
    for event in events[:2]:
        transcript.take(event)
        now[0] += 0.1
    assert transcript.seconds == 3.0


async def test_after_an_event_that_cannot_be_read_nothing_is_generated_again() -> None:
    kind, record = RequestKind.CHAT, Record("r", RequestKind.CHAT, 0.0, 0.0)
    kept = kept_stream(kind, {"temperature": 0, "tools": [TOOL]}, record, 1e9)
    assert kept is not None
    sent: list[bytes] = []
    unreadable = b'data: {"choices": 3}\n\n'
    take(kept, [*FIRST.answer(kind, kept.asked.data)[:3], unreadable], sent)
    assert sent[-1] == unreadable
    assert move(kept) is None
    assert "an event cannot be read" in record.not_resumed


PING = b'event: ping\ndata: {"type":"ping"}\n\n'
COMMENT = b": alive\n\n"


@pytest.mark.parametrize("kind", [RequestKind.MESSAGES, RequestKind.RESPONSES, RequestKind.CHAT])
async def test_what_keeps_a_connection_open_is_compared_with_nothing(kind: RequestKind) -> None:
    body = {"temperature": 0, "presence_penalty": 1}
    ping = COMMENT if kind is RequestKind.CHAT else PING
    first, other = (e.answer(kind, data_of(kind, body)) for e in (FIRST, OTHERS[0]))
    kept = kept_stream(kind, body, Record("r", kind, 0.0, 0.0), 1e9)
    assert kept is not None
    sent: list[bytes] = []
    take(kept, [first[0], ping, COMMENT, first[1], ping, *first[2:4]], sent)
    assert kept.move() is not None
    take(kept, [ping, *other[:2], COMMENT, *other[2:4], ping, *other[4:]], sent)
    assert sent.count(ping) + sent.count(COMMENT) >= 3
    texts = [each for each in sent if each not in (ping, COMMENT)]
    assert comparable(read(texts)) == comparable(read(first))


@pytest.mark.parametrize("kind", [RequestKind.MESSAGES, RequestKind.RESPONSES])
async def test_an_api_may_end_with_done_besides_its_own_last_event(kind: RequestKind) -> None:
    kept = kept_stream(kind, {"temperature": 0}, Record("r", kind, 0.0, 0.0), 1e9)
    assert kept is not None
    events = [*FIRST.answer(kind, kept.asked.data), DONE]
    assert [kept.read(event, last=False) for event in events] == events
    assert kept.read(b"", last=True) == b""
    kept = kept_stream(kind, {"temperature": 0}, Record("r", kind, 0.0, 0.0), 1e9)
    assert kept is not None
    with pytest.raises(StreamBroken, match="without a finish reason"):
        kept.read(events[0] + DONE, last=False)


async def test_an_engine_that_ends_at_once_has_not_generated_the_answer_again() -> None:
    """Though its client has the finish reason: it has no usage yet."""
    kind, options = RequestKind.COMPLETIONS, {"stream_options": {"include_usage": True}}
    body = {"temperature": 0, "presence_penalty": 1, **options}
    kept = kept_stream(kind, body, Record("r", kind, 0.0, 0.0), 1e9)
    assert kept is not None
    take(kept, FIRST.answer(kind, kept.asked.data)[:-2], [])
    assert kept.move() is not None
    with pytest.raises(StreamBroken, match="without a finish reason"):
        kept.read(DONE, last=False)


async def test_with_no_time_to_generate_nothing_is_generated_again() -> None:
    body = {"temperature": 0, "presence_penalty": 1}
    assert resumed(RequestKind.COMPLETIONS, body, 2, most=0.0).why


@pytest.mark.parametrize("asks_for_usage", [False, True])
async def test_a_chat_with_a_parser_that_lost_only_its_last_event_is_complete(
    asks_for_usage: bool,
) -> None:
    kind, options = RequestKind.CHAT, {"stream_options": {"include_usage": asks_for_usage}}
    body = {"messages": [{"role": "user", "content": "think"}], "temperature": 0, **options}
    kept = kept_stream(kind, body, Record("r", kind, 0.0, 0.0), 1e9)
    assert kept is not None
    events = FIRST.answer(kind, kept.asked.data)
    take(kept, events[: -2 if asks_for_usage else -1], [])
    assert kept.missing_end() == (None if asks_for_usage else DONE)


@pytest.mark.parametrize("asks_for_usage", [False, True])
async def test_a_finished_stream_that_lost_only_its_last_event_is_complete(
    asks_for_usage: bool,
) -> None:
    kind, record = RequestKind.CHAT, Record("r", RequestKind.CHAT, 0.0, 0.0)
    options = {"stream_options": {"include_usage": asks_for_usage}}
    kept = kept_stream(kind, {"temperature": 0, "n": 2, **options}, record, 1e9)
    assert kept is not None
    events = FIRST.answer(kind, kept.asked.data)
    end = -2 if asks_for_usage else -1
    take(kept, events[: end - 1], [])
    # The second choice is not finished.
    assert kept.missing_end() is None
    take(kept, events[end - 1 : end], [])
    # Only another engine knows the usage.
    assert kept.missing_end() == (None if asks_for_usage else DONE)


@pytest.mark.parametrize("silent", range(1, 5))
@pytest.mark.parametrize("body", [{}, {"return_token_ids": True}, {"logprobs": True}])
async def test_a_chat_whose_parser_has_no_text_for_a_token_goes_on(silent: int, body: Json) -> None:
    kind, body = RequestKind.CHAT, {"temperature": 0, **body}
    first = Engine("first", silent=silent)
    expected = comparable(read(first.answer(kind, data_of(kind, body))))
    for cut in range(1, len(first.answer(kind, data_of(kind, {"return_token_ids": True})))):
        for joined in ((1,), (2, 1, 3)):
            other = Engine("other", joined, silent=silent)
            got = resumed(kind, body, cut, other, first=first)
            assert not got.why
            assert comparable(read(got.sent)) == expected, (cut, joined)


@pytest.mark.parametrize("more", [{}, {"return_token_ids": True}, {"logprobs": True}])
async def test_a_chat_whose_engine_parses_after_a_text_is_generated_again(more: Json) -> None:
    kind, body = RequestKind.CHAT, {"temperature": 0, **more}
    first, other = Engine("first", calls=True), Engine("other", (2, 1, 3), calls=True)
    expected = comparable(read(first.answer(kind, data_of(kind, body))))
    events = first.answer(kind, data_of(kind, {"return_token_ids": True}))
    calls = next(n for n, event in enumerate(events) if b"tool_calls" in event)
    for cut in range(calls + 1, len(events)):
        got = resumed(kind, body, cut, other, first=first)
        assert json.loads(got.asked) == json.loads(data_of(kind, body))
        assert comparable(read(got.sent)) == expected, cut
