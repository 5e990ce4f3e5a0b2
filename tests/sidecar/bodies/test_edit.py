"""Edits that leave everything else as it was."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tandem_sidecar.bodies.edit import appended, with_member, with_members
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
    assert with_member(parse_body(before), "k", b"[1]") == after


def test_members_are_set_in_place_and_dropped() -> None:
    body = parse_body(b'{"max_tokens": 100, "big": 9007199254740993, "stop": ["x"], "z": 1.50}')
    edited = with_members(body.members, {"max_tokens": 1, "stream": False}, frozenset({"stop"}))
    assert edited == b'{"max_tokens":1,"big":9007199254740993,"z":1.50,"stream":false}'


def test_a_member_is_added_to_an_object_of_an_engine() -> None:
    assert appended(b'{"a": 1.50 }', "ids", b"[1, 2]") == b'{"a": 1.50 ,"ids":[1, 2]}'


TEXT = st.text('aZ_é"\\ \n\u2028\U0001f600', max_size=4)
SCALAR = st.none() | st.booleans() | st.integers() | TEXT
JSON = SCALAR | st.lists(SCALAR, max_size=3) | st.dictionaries(TEXT, SCALAR, max_size=3)


@settings(max_examples=60)
@given(st.dictionaries(TEXT, JSON, max_size=4), st.integers(0, 3))
def test_adding_and_setting_change_nothing_else(members: dict[str, object], indent: int) -> None:
    body = parse_body(json.dumps({"a": 1} | members, indent=indent).encode())
    before = json.loads(body.data)
    added = with_member(body, "kv_transfer_params", b"7")
    assert added.startswith(body.data[: body.data.rindex(b"}")])
    assert json.loads(added) == before | {"kv_transfer_params": 7}
    edited = json.loads(with_members(body.members, {"max_tokens": 1}, {"a"}))
    before.pop("a")
    assert list(edited.items()) == list((before | {"max_tokens": 1}).items())
