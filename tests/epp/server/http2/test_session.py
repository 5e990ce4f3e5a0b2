"""gRPC calls on streams: their messages, their end, and what is no call."""

import pytest
from h2.errors import ErrorCodes
from h2.settings import SettingCodes
from hpack import Decoder

from tandem_epp.server.http2 import frames, grpc
from tandem_epp.server.http2.errors import ErrorCode
from tandem_epp.server.http2.frames import FrameType, Setting

from .calls import Calls
from .client import BLOCK, GET, Frame, block, data, headers, message, ping


def fields(frame: Frame) -> dict[str, str]:
    return {str(name): str(value) for name, value in Decoder().decode(frame.payload)}


def status(answers: list[Frame]) -> str:
    """The status in the last header block of `answers`."""
    last = [f for f in answers if f.kind is FrameType.HEADERS][-1]
    assert last.is_end
    return fields(last)["grpc-status"]


def test_a_call_from_its_first_message_to_its_status() -> None:
    calls = Calls().start()
    head, content = calls.answers(headers(1), message(1, b"hi"))
    assert fields(head) == {":status": "200", "content-type": "application/grpc"}
    assert content.payload == grpc.framed(b"hi")
    assert [f.payload for f in calls.answers(message(1, b"there"))] == [grpc.framed(b"there")]
    assert status(calls.answers(data(1, end=True))) == "0"
    (handler,) = calls.handlers
    assert (handler.messages, handler.is_half_closed, handler.ends) == ([b"hi", b"there"], True, 1)
    assert not calls.session.calls
    assert not calls.connection.streams


def test_the_last_message_may_end_the_request() -> None:
    calls = Calls().start()
    answers = calls.answers(headers(1), message(1, b"hi", end=True))
    assert [f.kind for f in answers] == [FrameType.HEADERS, FrameType.DATA, FrameType.HEADERS]
    assert status(answers) == "0"


def test_messages_in_one_frame_and_over_frames() -> None:
    calls = Calls().start()
    wire = grpc.framed(b"a") + grpc.framed(b"") + grpc.framed(b"bc")
    calls.answers(headers(1), data(1, wire[:8]), data(1, wire[8:9]), data(1, wire[9:]))
    assert calls.handlers[0].messages == [b"a", b"", b"bc"]


def test_a_reset_ends_the_call_and_what_came_with_it_is_not_served() -> None:
    calls = Calls().start()
    calls.answers(headers(1), message(1, b"hi"))
    calls.answers(message(1, b"late"), frames.rst_stream(1, ErrorCode.CANCEL))
    (handler,) = calls.handlers
    assert (handler.messages, handler.is_half_closed, handler.ends) == ([b"hi"], False, 1)
    calls.answers(headers(3), message(3, b"hi"), frames.rst_stream(3, ErrorCode.CANCEL))
    assert len(calls.handlers) == 1, "a stream that is reset at once makes no work"


def test_a_handlers_fault_is_the_status() -> None:
    calls = Calls().start()
    answers = calls.answers(headers(1), message(1, b"refuse"), message(1, b"more"))
    assert status(answers) == "3"
    assert fields(answers[0])["grpc-message"] == "refused"
    (handler,) = calls.handlers
    assert (handler.messages, handler.ends) == ([b"refuse"], 1)
    assert calls.errors == []


def test_an_unexpected_error_of_a_handler_is_reported_and_ends_only_its_call() -> None:
    calls = Calls().start()
    calls.answers(headers(1), headers(3))
    answers = calls.answers(message(1, b"fail"), message(3, b"hi"))
    assert fields(answers[0])["grpc-status"] == "2"
    assert not any(b"secret" in f.payload for f in answers)
    assert answers[-1].payload == grpc.framed(b"hi")
    (error,) = calls.errors
    assert isinstance(error, KeyError)


@pytest.mark.parametrize(
    "end",
    [frames.rst_stream(1, 8), data(1, end=True), ping(b"short")],
    ids=["reset", "half", "lost"],
)
def test_an_error_at_the_end_of_a_call_is_reported_and_ends_nothing_else(end: bytes) -> None:
    calls = Calls().start()
    calls.answers(headers(1), headers(3), message(1, b"fail at the end"))
    calls.answers(end)
    assert len(calls.errors) == 1
    assert calls.handlers[0].ends == 1
    if calls.connection.fault is None:
        assert calls.answers(message(3, b"hi"))[-1].payload == grpc.framed(b"hi")
    calls.session.lost()
    assert [handler.ends for handler in calls.handlers] == [1, 1]


def test_a_call_may_end_while_the_client_still_sends() -> None:
    calls = Calls().start()
    answers = calls.answers(headers(1), message(1, b"finish"), message(1, b"late"))
    assert status(answers) == "0"
    assert answers[-1].code is ErrorCode.NO_ERROR
    assert calls.handlers[0].messages == [b"finish"]


def test_unknown_methods_and_wrong_timeouts() -> None:
    calls = Calls().start()
    unknown = BLOCK.replace(b"/test.Service/Method", b"/test.Service/Nether")
    assert status(calls.answers(headers(1, unknown))) == "12"
    assert status(calls.answers(headers(3, BLOCK + block({"grpc-timeout": "soon"})))) == "13"
    assert calls.handlers == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"\x01\0\0\0\x01x", "12"),
        (b"\0\xff\xff\xff\xff", "8"),
        (b"\0\0\0\0\x05abc", "13"),
    ],
    ids=["compressed", "too large", "cut"],
)
def test_broken_framing(content: bytes, expected: str) -> None:
    calls = Calls().start()
    assert status(calls.answers(headers(1), data(1, content, end=True))) == expected
    assert calls.handlers[0].ends == 1


def test_a_deadline_ends_the_call() -> None:
    calls = Calls().start()
    calls.answers(headers(1, BLOCK + block({"grpc-timeout": "250m"})))
    assert calls.deadlines == [0.25]
    (call,) = calls.session.calls
    calls.session.expire(call)
    assert status(calls.answers()) == "4"
    calls.session.expire(call)
    assert calls.answers() == []


def test_the_connections_end_ends_all_calls() -> None:
    calls = Calls().start()
    calls.answers(headers(1), headers(3))
    calls.session.lost()
    assert [handler.ends for handler in calls.handlers] == [1, 1]


def test_a_connection_error_ends_all_calls() -> None:
    calls = Calls().start()
    calls.answers(headers(1), headers(3))
    calls.answers(ping(b"short"))
    assert [handler.ends for handler in calls.handlers] == [1, 1]
    assert not calls.session.calls


def test_a_page_is_answered_at_the_end_of_the_request() -> None:
    calls = Calls().start()
    assert calls.answers(headers(1, GET)) == []
    head, content, end = calls.answers(data(1, end=True))
    assert fields(head)[":status"] == "200"
    assert (content.payload, end.is_end) == (b"ok\n", True)
    (only,) = calls.answers(headers(3, GET.replace(b"\x03GET", b"\x04HEAD"), end=True))
    assert only.is_end


@pytest.mark.parametrize(
    ("fields_", "code"),
    [
        ({":method": "GET", ":scheme": "http", ":path": "/nothing"}, "404"),
        ({":method": "PUT", ":scheme": "http", ":path": "/healthz"}, "404"),
        ({":method": "POST", ":scheme": "http", ":path": "/healthz"}, "415"),
        ({":method": "CONNECT", ":authority": "a:1"}, "404"),
    ],
)
def test_what_is_no_call_and_no_page(fields_: dict[str, str], code: str) -> None:
    calls = Calls().start()
    assert fields(calls.answers(headers(1, block(fields_), end=True))[0])[":status"] == code


def test_codes_are_those_of_the_protocol() -> None:
    assert {code.name: int(code) for code in ErrorCode} == {c.name: int(c) for c in ErrorCodes}
    known = {code.name: int(code) for code in SettingCodes}
    assert {setting.name: known[setting.name] for setting in Setting} == {
        setting.name: int(setting) for setting in Setting
    }
