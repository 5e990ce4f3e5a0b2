"""The bytes of requests, and settings that cannot be sent."""

import json
from typing import Any

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_loadtest.calls import Call, Message
from tandem_loadtest.client.request import RequestWriter
from tandem_loadtest.client.settings import (
    ClientSettings,
    Origin,
    SettingsError,
    parse_url,
    tls_context,
)

TALK = (Message("system", "s"), Message("user", "u"), Message("assistant", "a"))
USER = {"role": "user", "content": "hi"}
MESSAGES = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u"},
    {"role": "assistant", "content": "a"},
]
ASKS_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


def settings(**more: Any) -> ClientSettings:
    return ClientSettings(**{"url": "http://h:1/v1", "model": "tiny", **more})


def written(call: Call, request_id: str | None = None, **more: Any) -> tuple[list[str], Any]:
    """Lines of the head, and the body."""
    options = settings(**more)
    writer = RequestWriter(options, parse_url(options.url))
    head, _, body = writer.write(call, call.endpoint, request_id).partition(b"\r\n\r\n")
    return head.decode().split("\r\n"), json.loads(body)


@pytest.mark.parametrize(
    ("call", "path", "fields"),
    [
        (Call("once", 2), "/v1/completions",
         {"prompt": "once", "max_tokens": 2, "return_token_ids": True, **ASKS_USAGE}),
        (Call((5, 6), 2, stream=False, ignore_eos=True), "/v1/completions",
         {"prompt": [5, 6], "max_tokens": 2, "return_token_ids": True, "ignore_eos": True}),
        (Call(TALK, 2), "/v1/chat/completions",
         {"messages": MESSAGES, "max_tokens": 2, "return_token_ids": True, **ASKS_USAGE}),
        (Call("hi", 2, kind=RequestKind.CHAT, stream=False), "/v1/chat/completions",
         {"messages": [USER], "max_tokens": 2, "return_token_ids": True}),
        (Call(TALK, 2, kind=RequestKind.RESPONSES, ignore_eos=True), "/v1/responses",
         {"input": MESSAGES, "max_output_tokens": 2, "store": False, "ignore_eos": True,
          "stream": True}),
        (Call("hi", 2, kind=RequestKind.RESPONSES, stream=False), "/v1/responses",
         {"input": "hi", "max_output_tokens": 2, "store": False}),
        (Call(TALK, 2, kind=RequestKind.MESSAGES, ignore_eos=True), "/v1/messages",
         {"messages": MESSAGES[1:], "system": "s", "max_tokens": 2, "stream": True}),
        (Call("hi", 2, kind=RequestKind.MESSAGES, stream=False), "/v1/messages",
         {"messages": [USER], "max_tokens": 2}),
    ],
)  # fmt: skip
def test_the_body_of_each_api(call: Call, path: str, fields: dict[str, Any]) -> None:
    head, body = written(call)
    assert head[0] == f"POST {path} HTTP/1.1"
    assert body == {"model": "tiny", "temperature": 0, **fields}


@pytest.mark.parametrize("stream", [False, True])
def test_the_body_of_generate_has_sampling_parameters(stream: bool) -> None:
    call = Call((5, 6), 2, kind=RequestKind.GENERATE, ignore_eos=True, stream=stream)
    head, body = written(call, extra_body={"sampling_params": {"temperature": 1}})
    assert head[0] == "POST /inference/v1/generate HTTP/1.1"
    sampling = {"max_tokens": 2, "temperature": 1, "ignore_eos": True}
    usage = ASKS_USAGE if stream else {}
    assert body == {"model": "tiny", "token_ids": [5, 6], "sampling_params": sampling, **usage}


def test_vllms_fields_can_be_left_out() -> None:
    _, body = written(Call("x", 2), return_token_ids=False)
    assert not {"return_token_ids", "ignore_eos"} & set(body)


def test_extra_members_replace_the_clients() -> None:
    _, body = written(Call("x", 2), extra_body={"temperature": 0.7, "top_p": 0.9})
    assert (body["temperature"], body["top_p"], body["max_tokens"]) == (0.7, 0.9, 2)


def test_a_member_that_belongs_to_the_call_is_refused() -> None:
    with pytest.raises(SettingsError, match="'stream' cannot be set"):
        written(Call("x", 2), extra_body={"stream": True})


def test_a_call_names_its_model() -> None:
    assert written(Call("x", 2, model="adapter"))[1]["model"] == "adapter"


def test_the_head_has_the_fields_of_the_settings() -> None:
    head, body = written(
        Call("é", 2), "r-1", headers={"Authorization": "Bearer k", "Host": "other"}
    )
    fields = dict(line.split(": ") for line in head[1:])
    length = len(json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode())
    assert fields == {
        "host": "other",
        "user-agent": "tandem-bench",
        "accept": "*/*",
        "content-type": "application/json",
        "authorization": "Bearer k",
        "x-request-id": "r-1",
        "content-length": str(length),
    }


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a b": "c"}, "'a b' is not a valid name"),
        ({"": "c"}, "'' is not a valid name"),
        ({"a": "secret\r\nx: y"}, "the value of the header 'a'"),
        ({"a": "secret€"}, "the value of the header 'a'"),
        ({"Content-Length": "3"}, "'Content-Length' cannot be set"),
        ({"transfer-encoding": "chunked"}, "'transfer-encoding' cannot be set"),
    ],
)
def test_a_header_that_cannot_be_sent_is_refused(fields: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as info:
        written(Call("x", 2), headers=fields)
    assert "secret" not in str(info.value)


def test_an_id_that_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="x-request-id"):
        written(Call("x", 2), "r\n1")


@pytest.mark.parametrize(
    ("url", "origin"),
    [
        ("http://h", Origin("h", 80, False, "h", "")),
        ("http://h:81/", Origin("h", 81, False, "h:81", "")),
        ("https://h/v1", Origin("h", 443, True, "h", "")),
        ("https://h:1/a/b/v1/", Origin("h", 1, True, "h:1", "/a/b")),
        ("http://[::1]:2/v1", Origin("::1", 2, False, "[::1]:2", "")),
    ],
)
def test_urls(url: str, origin: Origin) -> None:
    assert parse_url(url) == origin


@pytest.mark.parametrize(
    "url",
    ["", "h:80", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://[", "http://h/?a=1",
     "http://h/#a", "http://u:p@h", "http://h/a b", "http://h/\u00e9", "http://" + "a" * 70],
)  # fmt: skip
def test_a_url_that_cannot_be_used_is_refused(url: str) -> None:
    with pytest.raises(SettingsError, match="URL"):
        parse_url(url)


def test_a_ca_file_that_cannot_be_read_is_refused(tmp_path: Any) -> None:
    with pytest.raises(SettingsError, match="absent"):
        tls_context(str(tmp_path / "absent"))
    empty = tmp_path / "empty"
    empty.write_text("")
    with pytest.raises(SettingsError, match="empty"):
        tls_context(str(empty))
