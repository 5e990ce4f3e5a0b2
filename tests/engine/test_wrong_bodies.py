"""Whatever a client sends, the engine's answer is no 5xx: each field with each wrong value."""

from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract.kv_reference import REFERENCE, STORE
from tandem_contract.transfer_params import CLIENT_FORBIDDEN, FIELD
from tandem_engine.body import _NEUTRAL, ApiError, parse_kv_transfer
from tandem_engine.info import DetokenizeBody, TokenizeBody
from tandem_engine.protocol import (
    ChatBody,
    CompletionBody,
    StreamOptions,
    parse_chat,
    parse_completion,
    resolve,
)

from .fake_engine import FakeEngine, answer_with
from .test_server import REMOTE, Client, Connect, connect, model

pytestmark = pytest.mark.long

__all__ = ["connect", "model"]

WRONG = (
    *(b"null", b"true", b"false", b"0", b"1", b"-1", b"1.5", b"-0", b"NaN", b"Infinity", b"-"),
    *(b'""', b'"x"', b'"1"', b'"\\ud800"', b'"\\u0000"', b'"\xff"', b'"\xed\xa0\x80"', b'"\\x"'),
    *(b"[]", b"[1]", b"[null]", b'["a", 1]', b"[[]]", b"[[1], null]", b"[{}]", b'[{"role": 1}]'),
    *(b"{}", b'{"a": 1}', b'{"": [{}]}', b"{1: 2}", b"", b" "),
    *(b"9007199254740993", b"18446744073709551616", b"-9223372036854775809", b"1e400", b"1e-400"),
    *(b"9" * 5000, b"-" + b"9" * 5000, b"9" * 5000 + b".5", b"1e" + b"9" * 5000),
    *(b'["a", ' + b"9" * 5000 + b"]", b'{"a": ' + b"9" * 5000 + b"}"),
    *(b"[" * 2000 + b"]" * 2000, b'{"a":' * 500 + b"1" + b"}" * 500, b'"' + b"a" * 2000 + b'"'),
)
"""JSON, and what is none, that is wrong for most fields."""
MESSAGE = b'{"messages": [{"role": "user", %b}]}'
CHAT = b'{"messages": [{"role": "user", "content": "hello"}], %b}'


def names(*bodies: type[msgspec.Struct]) -> set[str]:
    return {field.name for body in bodies for field in msgspec.structs.fields(body)}


def inside(outer: str, *members: str) -> Iterator[bytes]:
    """Templates of a member whose value is an object with one wrong member."""
    for member in members:
        yield b'"%b": {"%b": %%b}' % (outer.encode(), member.encode())


GENERATION = [
    *(b'"%b": %%b' % name.encode() for name in sorted({*_NEUTRAL, *CLIENT_FORBIDDEN, "unknown"})),
    *inside("stream_options", *names(StreamOptions)),
    *inside(FIELD, *REMOTE, STORE, REFERENCE, "prompt_token_ids", "stream"),
    *inside("chat_template_kwargs", "add_generation_prompt", "tools", "messages", "bos_token"),
    *(
        b'"%b": %b, "%b": {"do_remote_prefill": true, %b}'
        % (b"max_tokens", b"1", FIELD.encode(), b'"%b": %%b' % name.encode())
        for name in REMOTE
    ),
]
PLACES = {
    "/v1/completions": [
        *(b'{"prompt": "hello", %b}' % member for member in GENERATION),
        *(
            b'{"prompt": "hello", "%b": %%b}' % name.encode()
            for name in sorted(names(CompletionBody))
        ),
        b"%b",
    ],
    "/v1/chat/completions": [
        *(CHAT % member for member in GENERATION),
        *(CHAT % (b'"%b": %%b' % name.encode()) for name in sorted(names(ChatBody))),
        *(MESSAGE % b'"%b": %%b' % name for name in (b"content", b"name", b"tool_calls", b"a")),
        *(
            b'{"messages": [{"role": "user", "content": [{"type": "text", "%b": %%b}]}]}' % name
            for name in (b"text", b"type", b"image_url")
        ),
        b'{"messages": [%b]}',
        b'{"messages": [{"role": %b, "content": "a"}]}',
        b'{"messages": [{"role": "assistant", "content": "a", "tool_calls": [%b]}]}',
        b'{"messages": [{"role": "assistant", "tool_calls": [{"function": {"arguments": %b}}]}]}',
    ],
    "/tokenize": [
        *(b'{"prompt": "a", "%b": %%b}' % name.encode() for name in sorted(names(TokenizeBody))),
        b'{"messages": [{"role": "user", "content": %b}]}',
        b"%b",
    ],
    "/detokenize": [
        b"%b",
        *(b'{"tokens": [1], "%b": %%b}' % name.encode() for name in sorted(names(DetokenizeBody))),
    ],
}
"""Path → bodies with a place for a wrong value."""


async def status(client: Client, path: str, body: bytes) -> int:
    headers = {"content-type": "application/json"}
    async with client.http.post(path, data=body, headers=headers) as response:
        await response.read()
        return response.status


@pytest.mark.parametrize("path", PLACES)
async def test_no_field_makes_the_engine_fail(connect: Connect, path: str) -> None:
    client = await connect(FakeEngine(answer_with("world")))
    failed = [
        (body, value[:40])
        for body in dict.fromkeys(PLACES[path])
        for value in WRONG
        if await status(client, path, body % value) >= 500
    ]
    assert failed == []


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "a"]), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = st.sampled_from(sorted({*names(CompletionBody, ChatBody), *_NEUTRAL, FIELD}))


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(FIELDS, JSON, min_size=1, max_size=4), st.booleans())
def test_no_value_passes_the_parsers_by_another_error(
    members: dict[str, object], is_chat: bool
) -> None:
    """The parsers alone: what they raise is the client's error."""
    base: dict[str, object] = (
        {"messages": [{"role": "user", "content": "a"}]} if is_chat else {"prompt": "a"}
    )
    body = {**base, **members}
    with suppress(ApiError):
        kv = parse_kv_transfer(body)
        call = (parse_chat if is_chat else parse_completion)(body, kv)
        resolve(call, (1, 2), 64, 300)


async def test_a_number_of_five_thousand_digits_is_named(connect: Connect) -> None:
    client = await connect(FakeEngine(answer_with("world")))
    body = b'{"prompt": "a", "seed": %b}' % (b"9" * 5000)
    async with client.http.post("/v1/completions", data=body) as response:
        assert response.status == 400
        assert "a number that is out of range" in (await response.json())["error"]["message"]
