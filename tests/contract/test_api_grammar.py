"""The table of the APIs: first tokens, errors, caps and state."""

import json

import pytest

from tandem_contract.api_grammar import (
    GRAMMARS,
    Meaning,
    error_body,
    error_event,
)
from tandem_contract.openai_errors import read_error
from tandem_contract.request_kinds import RequestKind
from tandem_contract.single_engine import FIELDS
from tandem_contract.stream_start import StreamStart, read_event

COMPLETIONS, CHAT, RESPONSES, MESSAGES, GENERATE = RequestKind

PREAMBLES = [
    (COMPLETIONS, {"choices": [{"index": 0, "text": "", "finish_reason": None}]}),
    (CHAT, {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),
    (CHAT, {"choices": [{"delta": {"role": "assistant", "content": None, "tool_calls": []}}]}),
    (CHAT, {"choices": [], "usage": {"prompt_tokens": 3}}),
    (GENERATE, {"choices": [{"index": 0, "token_ids": []}]}),
    (RESPONSES, {"type": "response.created", "response": {"error": None, "output": []}}),
    (RESPONSES, {"type": "response.queued", "response": {}}),
    (RESPONSES, {"type": "response.in_progress", "response": {}}),
    (RESPONSES, {"type": "response.output_item.added", "item": {"type": "message"}}),
    (RESPONSES, {"type": "response.content_part.added", "part": {"text": ""}}),
    (RESPONSES, {"type": "response.output_text.delta", "delta": ""}),
    (MESSAGES, {"type": "message_start", "message": {"usage": {"input_tokens": 3}}}),
    (MESSAGES, {"type": "ping"}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "text", "text": ""}}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"type": "thinking"}}),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "text_delta", "text": ""}}),
]
TOKENS = [
    (COMPLETIONS, {"choices": [{"text": "a"}]}),
    (COMPLETIONS, {"choices": [{"text": "", "token_ids": [7]}]}),
    (COMPLETIONS, {"choices": [{"index": 1, "text": ""}, {"index": 0, "text": "a"}]}),
    (CHAT, {"choices": [{"delta": {"content": "a"}}]}),
    (CHAT, {"choices": [{"delta": {"reasoning": "hm"}}]}),
    (CHAT, {"choices": [{"delta": {"reasoning_content": "hm"}}]}),
    (CHAT, {"choices": [{"delta": {"refusal": "no"}}]}),
    (CHAT, {"choices": [{"delta": {}, "logprobs": {"content": [{"token": "<think>"}]}}]}),
    (CHAT, {"choices": [{"delta": {"tool_calls": [{"function": {"name": "f"}}]}}]}),
    (GENERATE, {"choices": [{"token_ids": [1]}]}),
    (RESPONSES, {"type": "response.output_text.delta", "delta": "a"}),
    (RESPONSES, {"type": "response.reasoning_text.delta", "delta": "hm"}),
    (RESPONSES, {"type": "response.function_call_arguments.delta", "delta": "{"}),
    (RESPONSES, {"type": "response.output_item.added", "item": {"name": "f"}}),
    (RESPONSES, {"type": "response.of_a_later_version"}),
    (MESSAGES, {"type": "content_block_start", "content_block": {"name": "f", "input": {}}}),
    (MESSAGES, {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "a"}}),
    (MESSAGES, {"type": "content_block_delta", "delta": {"thinking": "hm"}}),
    (MESSAGES, {"type": "content_block_delta", "delta": {"partial_json": "{"}}),
]
ENDS = [
    (COMPLETIONS, {"choices": [{"text": "", "finish_reason": "stop"}]}),
    (CHAT, {"choices": [{"delta": {}, "finish_reason": "length"}]}),
    (RESPONSES, {"type": "response.completed", "response": {}}),
    (RESPONSES, {"type": "response.incomplete", "response": {}}),
    (MESSAGES, {"type": "message_delta", "delta": {"stop_reason": "end_turn"}}),
    (MESSAGES, {"type": "message_stop"}),
]
ERRORS = [
    (COMPLETIONS, {"error": {"message": "lost"}}),
    (COMPLETIONS, {"choices": [{"text": "", "finish_reason": "error"}]}),
    (CHAT, {"object": "error", "message": "lost", "code": 500}),
    (GENERATE, {"error": {"message": "lost"}}),
    (RESPONSES, {"type": "error", "message": "lost"}),
    (RESPONSES, {"type": "response.failed", "response": {"error": {}}}),
    (RESPONSES, {"error": {"message": "lost"}}),
    (MESSAGES, {"type": "error", "error": {"message": "lost"}}),
    (MESSAGES, {"error": {"message": "lost"}}),
]
CASES = [
    (kind, event, meaning)
    for meaning, events in (
        (Meaning.NOTHING, PREAMBLES),
        (Meaning.TOKEN, TOKENS),
        (Meaning.END, ENDS),
        (Meaning.ERROR, ERRORS),
    )
    for kind, event in events
]


@pytest.mark.parametrize(("kind", "event", "meaning"), CASES)
def test_an_event_has_its_meaning(
    kind: RequestKind, event: dict[str, object], meaning: Meaning
) -> None:
    assert read_event(kind, b"", json.dumps(event).encode()) is meaning


@pytest.mark.parametrize(
    ("event", "meaning"),
    [
        ({"error": {"message": "lost"}}, Meaning.ERROR),
        ({"message": "hello"}, Meaning.NOTHING),
        ({"type": "response.failed"}, Meaning.NOTHING),
    ],
)
def test_of_an_api_without_a_row_errors_of_openais_form_are_known(
    event: dict[str, object], meaning: Meaning
) -> None:
    assert read_event(None, b"", json.dumps(event).encode()) is meaning
    assert read_event(None, b"error", b"{}") is Meaning.ERROR


@pytest.mark.parametrize("kind", RequestKind)
@pytest.mark.parametrize("data", [b"first", b"[1]", b'{"choices": 7, "type": 7}', b'{"type"'])
def test_what_cannot_be_read_delays_nothing(kind: RequestKind, data: bytes) -> None:
    assert read_event(kind, b"", data) is Meaning.TOKEN


@pytest.mark.parametrize("kind", RequestKind)
def test_done_ends_a_stream_and_a_named_error_fails_it(kind: RequestKind) -> None:
    assert read_event(kind, b"", b"[DONE]") is Meaning.END
    assert read_event(kind, b"error", b"anything") is Meaning.ERROR


def chunked(*events: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in events)


START = b'event: message_start\ndata: {"type":"message_start"}\n\n'
PING = b'event: ping\r\ndata: {"type":\r\ndata: "ping"}\r\n\r\n'
BLOCK = b'event: content_block_start\ndata: {"type":"content_block_start","content_block":{}}\n\n'
DELTA = b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"a"}}\n\n'
ERROR = b'event: error\ndata: {"type":"error","error":{}}\n\n'


@pytest.mark.parametrize(("last", "meaning"), [(DELTA, Meaning.TOKEN), (ERROR, Meaning.ERROR)])
@pytest.mark.parametrize("wire", [True, False])
@pytest.mark.parametrize("size", [1, 7, 10_000])
def test_a_stream_is_read_up_to_its_first_token(
    last: bytes, meaning: Meaning, wire: bool, size: int
) -> None:
    events = (b": keep-alive\n\n", START, PING, BLOCK, last)
    data = chunked(*events) if wire else b"".join(events)
    start, before = StreamStart(MESSAGES), len(data) - (2 if wire else 0)
    meanings = [start.take(data[at : at + size]) for at in range(0, before, size)]
    assert meanings[-1] is meaning
    assert set(meanings[:-1]) <= {Meaning.NOTHING}


def test_a_chunk_may_end_between_the_lines_of_an_event() -> None:
    name, data = ERROR.split(b"\n", 1)
    assert StreamStart(MESSAGES).take(chunked(name + b"\n", data)) is Meaning.ERROR


@pytest.mark.parametrize("kind", RequestKind)
def test_each_error_event_is_read_as_one(kind: RequestKind) -> None:
    event = error_event(kind, 502, "two\nlines\r\n\r\nand more")
    assert StreamStart(kind).take(event) is Meaning.ERROR
    assert event.endswith(b"}\n\n")
    assert b"\r" not in event
    name, _, data = event.rpartition(b"data: ")
    body = json.loads(data)
    assert body["error"]["message"] == "two\nlines\r\n\r\nand more"
    named = kind in (RESPONSES, MESSAGES)
    assert name == (b"event: error\n" if named else b"")
    assert body.get("type") == ("error" if named else None)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (404, "not_found_error"),
        (413, "request_too_large"),
        (415, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (502, "api_error"),
        (503, "overloaded_error"),
        (504, "timeout_error"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages?x=1", "/v1/messages/count_tokens"])
def test_an_error_of_messages_has_anthropics_form(path: str, status: int, kind: str) -> None:
    assert json.loads(error_body(path, status, "why")) == {
        "type": "error",
        "error": {"type": kind, "message": "why"},
    }


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messagesx", "/", "*", ""])
def test_every_other_error_has_openais_form(path: str) -> None:
    error = json.loads(error_body(path, 502, "why", param="model"))["error"]
    assert error == {"message": "why", "type": "BadGatewayError", "param": "model", "code": 502}


@pytest.mark.parametrize("kind", RequestKind)
def test_a_split_request_leaves_no_state_in_an_engine(kind: RequestKind) -> None:
    grammar = GRAMMARS[kind]
    turned_off = {field for field, value in grammar.cap.changes.items() if value is False}
    assert grammar.stored <= turned_off | FIELDS[kind]


@pytest.mark.parametrize("kind", RequestKind)
def test_the_last_events_of_the_table_end_a_stream(kind: RequestKind) -> None:
    for name in GRAMMARS[kind].last_events:
        data = name if name == b"[DONE]" else json.dumps({"type": name.decode()}).encode()
        assert read_event(kind, name, data) in {Meaning.END, Meaning.ERROR}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b'{"error": {"message": "lost", "code": 503}}', (503, "lost")),
        (b'{"object": "error", "message": "too long", "code": 400}', (400, "too long")),
        (
            b'{"type": "error", "error": {"type": "internal_error", "message": "lost"}}',
            (500, "lost"),
        ),
        (b'{"type": "response.failed", "response": {"error": {"message": "lost"}}}', (500, "lost")),
        (b'{"choices": [{"finish_reason": "error"}]}', (500, "the engine failed the request")),
        (b'{"error": {"message": 7, "code": "200"}}', (500, "the engine failed the request")),
        (b"first", (500, "the engine failed the request")),
    ],
)
def test_an_error_event_has_a_status_and_a_message(data: bytes, error: tuple[int, str]) -> None:
    assert read_error(data) == error


@pytest.mark.parametrize("kind", RequestKind)
def test_the_error_event_of_a_kind_can_be_read(kind: RequestKind) -> None:
    start = StreamStart(kind)
    assert start.take(error_event(kind, 503, "lost")) is Meaning.ERROR
    assert start.error()[1] == "lost"
