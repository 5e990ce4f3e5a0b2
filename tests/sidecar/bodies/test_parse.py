"""What a client may not say, byte-exact edits, and the rule for one engine."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_sidecar.bodies.parse import (
    BadBody,
    Kind,
    clean_passthrough,
    kind_of,
    parse_body,
    unified_reason,
    with_member,
    with_members,
)

EXACT = b' { "z":1, "n" :9007199254740993,"a":[ 1.0,2e5 ],\t"u\\u00e9":"\\/" }\n'


@pytest.mark.parametrize(
    ("method", "target", "kind"),
    [
        (b"POST", b"/v1/completions", Kind.COMPLETIONS),
        (b"POST", b"/v1/chat/completions?x=1", Kind.CHAT),
        (b"GET", b"/v1/completions", None),
        (b"POST", b"/v1/completions/", None),
        (b"POST", b"/v1/embeddings", None),
    ],
)
def test_kind(method: bytes, target: bytes, kind: Kind | None) -> None:
    assert kind_of(method, target) is kind


def test_a_body_that_needs_nothing_stays_the_same_bytes() -> None:
    assert parse_body(EXACT).data is EXACT


SMUGGLED = [
    b'{"kv_transfer_params":{"do_remote_prefill":true},"a":12345678901234567890}',
    b'{"a":12345678901234567890,"kv_transfer_params":1,"kv_transfer_params":2}',
    b'{"kv_transfer_params":null,"a":12345678901234567890,"kv_transfer\\u005fparams":{}}',
    b'{"request_id":"x","ec_transfer_params":{},"a":12345678901234567890}',
    b'{"\\u0072equest_id":"x","a":12345678901234567890}',
]


@pytest.mark.parametrize("data", SMUGGLED)
def test_forbidden_fields_go_at_every_occurrence(data: bytes) -> None:
    assert parse_body(data).data == b'{"a":12345678901234567890}'
    assert clean_passthrough(data, b"application/json") == b'{"a":12345678901234567890}'


def test_forbidden_fields_go_from_vllms_extra_arguments() -> None:
    data = b'{"a":1,"vllm_xargs":{"kv_transfer_params":"x","b":1e400},"c":2}'
    assert parse_body(data).data == b'{"a":1,"vllm_xargs":{"b":1e400},"c":2}'
    harmless = b'{"vllm_xargs": {"b": 1}}'
    assert parse_body(harmless).data is harmless
    odd = b'{"vllm_xargs": [1]}'
    assert parse_body(odd).data is odd


REFUSED = [
    b"",
    b"[]",
    b"{",
    b'{"a": NaN, "kv_transfer_params": {}}',
    b'\xef\xbb\xbf{"kv_transfer_params": {}}',
    '{"kv_transfer_params": {}}'.encode("utf-16"),
    b"{'a': 1}",
    b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"\xff": 1}',
]


@pytest.mark.parametrize("data", REFUSED)
def test_what_an_engine_might_read_otherwise_is_refused(data: bytes) -> None:
    with pytest.raises(BadBody):
        parse_body(data)


def test_passthrough_keeps_what_holds_no_member() -> None:
    form = b'--x\r\n{"kv_transfer_params": 1'
    assert clean_passthrough(form, b"multipart/form-data; boundary=x") is form
    assert clean_passthrough(b"[1, 2]", b"application/json") == b"[1, 2]"
    assert clean_passthrough(b"", b"") == b""
    with pytest.raises(BadBody):
        clean_passthrough(b'{"a": NaN}', b"")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"{}", b'{"k":[1]}'),
        (b" { } \n", b' { "k":[1]}'),
        (EXACT, EXACT.rstrip()[:-1] + b',"k":[1]}'),
    ],
)
def test_a_member_is_added_without_touching_the_others(before: bytes, after: bytes) -> None:
    assert with_member(parse_body(before), "k", b"[1]") == after


def test_members_are_set_in_place_and_dropped() -> None:
    body = parse_body(b'{"max_tokens": 100, "big": 9007199254740993, "stop": ["x"], "z": 1.50}')
    edited = with_members(body, {"max_tokens": 1, "stream": False}, frozenset({"stop"}))
    assert edited == b'{"max_tokens":1,"big":9007199254740993,"z":1.50,"stream":false}'


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=10,
)


@settings(max_examples=40)
@given(st.dictionaries(st.text(st.characters(codec="utf-8")), JSON), st.integers(0, 3))
def test_edits_change_nothing_else(members: dict[str, object], indent: int) -> None:
    members.pop("vllm_xargs", None)
    clean = {k: v for k, v in members.items() if k not in ("kv_transfer_params", "request_id")}
    dirty = json.dumps({"request_id": 1} | members, indent=indent).encode()
    body = parse_body(dirty)
    assert list(json.loads(body.data).items()) == list(clean.items())
    assert json.loads(with_member(body, "kv_transfer_params", b"7")) == clean | {
        "kv_transfer_params": 7
    }


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        (Kind.COMPLETIONS, '{"prompt": "x"}', None),
        (Kind.COMPLETIONS, '{"prompt": "x", "n": 1, "best_of": null, "echo": false}', None),
        (Kind.COMPLETIONS, '{"prompt": "x", "n": 2}', "n"),
        (Kind.COMPLETIONS, '{"prompt": "x", "n": "2"}', "n"),
        (Kind.COMPLETIONS, '{"prompt": "x", "best_of": 3}', "best_of"),
        (Kind.COMPLETIONS, '{"prompt": "x", "use_beam_search": true}', "beam_search"),
        (Kind.COMPLETIONS, '{"prompt": "x", "prompt_logprobs": 0}', "prompt_logprobs"),
        (Kind.COMPLETIONS, '{"prompt": "x", "echo": true, "logprobs": 0}', "echo_logprobs"),
        (Kind.COMPLETIONS, '{"prompt": "x", "echo": true}', None),
        (Kind.COMPLETIONS, '{"prompt": "x", "logprobs": 1}', None),
        (Kind.COMPLETIONS, '{"prompt": [ 1, 2, 3]}', None),
        (Kind.COMPLETIONS, '{"prompt": [[1, 2]]}', None),
        (Kind.COMPLETIONS, '{"prompt": ["one"]}', None),
        (Kind.COMPLETIONS, '{"prompt": [[1], [2]]}', "batch"),
        (Kind.COMPLETIONS, '{"prompt": [\\n "one", "two"]}', "batch"),
        (Kind.COMPLETIONS, '{"prompt": []}', None),
        (Kind.CHAT, '{"messages": [], "previous_response_id": "r"}', "previous_response"),
        (Kind.CHAT, '{"messages": [{"content": "see image_url"}]}', None),
        (
            Kind.CHAT,
            '{"messages": [{"content": [{"image_url": {"url": "data:image/png;base64,"}}]}]}',
            None,
        ),
        (
            Kind.CHAT,
            '{"messages": [{"content": [{"image_url": {"url": "http://h/i.png"}}]}]}',
            "media_by_url",
        ),
        (
            Kind.CHAT,
            '{"messages": [{"content": [{"video\\\\u005furl": "https://h/i.mp4"}]}]}',
            "media_by_url",
        ),
    ],
)
def test_unified_by_rule(kind: Kind, text: str, reason: str | None) -> None:
    data = text.replace("\\n", "\n").replace("\\\\", "\\").encode()
    assert unified_reason(kind, parse_body(data)) == reason


def test_a_field_that_cannot_be_read_is_refused() -> None:
    body = parse_body(b'{"n": "\xff"}')
    with pytest.raises(BadBody):
        unified_reason(Kind.CHAT, body)
