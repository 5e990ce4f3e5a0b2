"""Edits of a body for its legs; they leave everything else as it was."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.bodies.edit import (
    add_member,
    add_member_to_object,
    cap_to_one_token,
    replace_members,
)
from tandem_sidecar.bodies.parse import parse_body

EXACT = b' { "z":1, "n" :9007199254740993,"a":[ 1.0,2e5 ],\t"u\\u00e9":"\\/" }\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b"{}", b'{"k":[1]}'),
        (b" { } \n", b' { "k":[1]}'),
        (EXACT, EXACT.rstrip()[:-1] + b',"k":[1]}'),
    ],
)
def test_a_member_is_added_without_touching_the_others(before: bytes, after: bytes) -> None:
    assert add_member(parse_body(before), "k", b"[1]") == after


def test_members_are_set_in_place_and_dropped() -> None:
    body = parse_body(b'{"max_tokens": 100, "big": 9007199254740993, "stop": ["x"], "z": 1.50}')
    edited = replace_members(body.members, {"max_tokens": 1, "stream": False}, frozenset({"stop"}))
    assert edited == b'{"max_tokens":1,"big":9007199254740993,"z":1.50,"stream":false}'


def test_a_member_is_added_to_an_object_of_an_engine() -> None:
    assert add_member_to_object(b'{"a": 1.50 }', "ids", b"[1, 2]") == b'{"a": 1.50 ,"ids":[1, 2]}'


TEXT = st.text('aZ_é"\\ \n\u2028\U0001f600', max_size=4)
SCALAR = st.none() | st.booleans() | st.integers() | TEXT
JSON = SCALAR | st.lists(SCALAR, max_size=3) | st.dictionaries(TEXT, SCALAR, max_size=3)


@settings(max_examples=60)
@given(st.dictionaries(TEXT, JSON, max_size=4), st.integers(0, 3))
def test_adding_and_replacing_members_change_nothing_else(
    members: dict[str, object], indent: int
) -> None:
    body = parse_body(json.dumps({"a": 1} | members, indent=indent).encode())
    before = json.loads(body.data)
    added = add_member(body, "kv_transfer_params", b"7")
    assert added.startswith(body.data[: body.data.rindex(b"}")])
    assert json.loads(added) == before | {"kv_transfer_params": 7}
    edited = json.loads(replace_members(body.members, {"max_tokens": 1}, {"a"}))
    before.pop("a")
    assert list(edited.items()) == list((before | {"max_tokens": 1}).items())


CLIENT = {
    "model": "m",
    "stream": True,
    "stream_options": {"include_usage": True},
    "stop": ["x"],
    "stop_token_ids": [1],
    "return_token_ids": True,
    "tools": [{"type": "function"}],
    "seed": 9007199254740993,
    "thinking": {"type": "enabled", "budget_tokens": 2048},
}
KEPT = {"model": "m", "tools": [{"type": "function"}], "seed": 9007199254740993}


def leg(kind: RequestKind, **more: Any) -> dict[str, Any]:
    data = cap_to_one_token(kind, parse_body(json.dumps(CLIENT | more).encode()), {"added": 1})
    parsed: dict[str, Any] = json.loads(data)
    return parsed


@pytest.mark.parametrize(
    ("kind", "fields", "cap"),
    [
        (
            RequestKind.COMPLETIONS,
            {"max_tokens": 100, "min_tokens": 5},
            {"stream": False, "max_tokens": 1, "min_tokens": 1, "ignore_eos": True},
        ),
        (
            RequestKind.CHAT,
            {"max_completion_tokens": 100},
            {
                "stream": False,
                "max_tokens": 1,
                "max_completion_tokens": 1,
                "min_tokens": 1,
                "ignore_eos": True,
            },
        ),
    ],
)
def test_a_prefill_leg_generates_one_token(
    kind: RequestKind, fields: dict[str, Any], cap: dict[str, Any]
) -> None:
    assert leg(kind, **fields) == KEPT | {"thinking": CLIENT["thinking"], "added": 1} | cap


def test_prefill_of_responses_stores_nothing() -> None:
    body = leg(RequestKind.RESPONSES, max_output_tokens=100, store=True, background=False)
    assert (body["max_output_tokens"], body["ignore_eos"], body["stream"]) == (1, True, False)
    assert (body["store"], body["background"]) == (False, False)
    assert "stop" not in body
    assert "max_tokens" not in body


def test_prefill_of_messages_sets_only_fields_of_its_schema() -> None:
    body = leg(RequestKind.MESSAGES, max_tokens=4096, stop_sequences=["x"])
    assert (body["max_tokens"], body["stream"]) == (1, False)
    assert not {"stop_sequences", "min_tokens", "ignore_eos"} & body.keys()


@pytest.mark.parametrize(
    ("thinking", "stays"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, False),
        ({"type": "disabled"}, True),
        ({"type": "adaptive"}, True),
        ("enabled", True),
        (None, True),
    ],
)
def test_a_thinking_budget_above_one_token_is_removed(thinking: object, stays: bool) -> None:
    """vLLM refuses a budget that is not below max_tokens; what shapes the prompt stays."""
    body = leg(RequestKind.MESSAGES, max_tokens=4096, thinking=thinking)
    assert body.get("thinking", "removed") == (thinking if stays else "removed")


def test_prefill_of_generate_is_capped_in_its_sampling_params() -> None:
    sampling = {"seed": 9007199254740993, "max_tokens": 9, "stop": ["x"], "stop_token_ids": [1]}
    body = leg(RequestKind.GENERATE, sampling_params=sampling, token_ids=[1, 2])
    assert body["sampling_params"] == {
        "seed": 9007199254740993,
        "max_tokens": 1,
        "min_tokens": 1,
        "ignore_eos": True,
    }
    assert body["stream"] is False
    assert not {"max_tokens", "stream_options", "return_token_ids"} & body.keys()
    assert leg(RequestKind.GENERATE, sampling_params=7)["sampling_params"] == 7
    assert "sampling_params" not in leg(RequestKind.GENERATE)


def test_members_set_by_the_hand_off_override_the_clients() -> None:
    body = parse_body(b'{"return_token_ids":false,"stream":true}')
    assert cap_to_one_token(RequestKind.CHAT, body, {"return_token_ids": True}).endswith(
        b'"return_token_ids":true}'
    )
