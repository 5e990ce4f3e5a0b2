"""Error bodies in OpenAI's shape."""

import json

import pytest

from tandem_contract.openai_errors import TYPES, error_body, error_event, read_error


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *TYPES.items(),
        (500, "InternalServerError"),
        (599, "InternalServerError"),
        (418, "BadRequestError"),
    ],
)
def test_a_status_has_its_type(status: int, kind: str) -> None:
    assert json.loads(error_body(status, "why", param="model")) == {
        "error": {"message": "why", "type": kind, "param": "model", "code": status}
    }


def test_an_event_is_one_line_whatever_the_message() -> None:
    event = error_event(502, "two\nlines\r\n\r\nand more")
    assert event.startswith(b"data: ")
    assert event.endswith(b"}\n\n")
    assert event.count(b"\n") == 2
    assert b"\r" not in event
    assert json.loads(event[len(b"data: ") :])["error"]["message"] == "two\nlines\r\n\r\nand more"


@pytest.mark.parametrize(
    ("event", "error"),
    [
        (b'{"error": {"error": "no room"}}', (500, "no room")),
        (b'{"response": {"error": "no room"}}', (500, "no room")),
        (b'{"error": "no room"}', (500, "no room")),
        (b'{"error": {"error": [1]}}', (500, "the engine failed the request")),
        (b'{"error": {"error": {"message": "no room", "code": 503}}}', (503, "no room")),
    ],
)
def test_errors_of_every_shape_are_read(event: bytes, error: tuple[int, str]) -> None:
    assert read_error(event) == error
