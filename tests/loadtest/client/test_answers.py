"""The message of an error answer."""

import pytest

from tandem_loadtest.client.answers import ServerMessage, server_message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"error": {"message": "no such model"}}', ServerMessage("no such model")),
        (b'{"error": {"type": "a", "code": "b"}}', ServerMessage("no message", "a b")),
        (b'{"error": {"message": "x", "type": "a", "code": 400}}', ServerMessage("x", "a")),
        (b'{"error": {"message": "x", "type": "a b", "code": ["c"]}}', ServerMessage("x")),
        (b'{"error": "no such model"}', ServerMessage("no such model")),
        (b'{"object": "error", "message": "older", "type": "a"}', ServerMessage("older", "a")),
        (b'{"type": "error", "error": {"type": "x", "message": "y"}}', ServerMessage("y", "x")),
        (b'{"type": "error", "code": "b", "message": "event"}', ServerMessage("event", "b")),
        (b"upstream connect error\r\n", ServerMessage("upstream connect error")),
        (b'{"detail": "x"}', ServerMessage('{"detail": "x"}')),
        (b"", ServerMessage("an empty body")),
        (b"\xff", ServerMessage("\ufffd")),
    ],
)
def test_the_message_of_an_error_response(body: bytes, message: ServerMessage) -> None:
    assert server_message(body) == message
