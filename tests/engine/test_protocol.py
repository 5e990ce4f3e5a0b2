"""Bodies to calls: whatever a client sends is a call or an `ApiError`, never anything else."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_engine.body import ApiError, decode_json, parse_kv_transfer, refuse_unsupported
from tandem_engine.protocol import (
    Call,
    ChatBody,
    CompletionBody,
    parse_chat,
    parse_completion,
    resolve,
)
from tandem_engine.types import RemoteDecode, SamplingParams

PULL = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "h",
    "remote_port": 1,
    "remote_block_ids": [[1]],
}

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=5,
)
FIELDS = [*CompletionBody.__struct_fields__, *ChatBody.__struct_fields__, "kv_transfer_params"]


def _outcome(decide: Callable[[], object]) -> object:
    """What `decide` returns, or the error it raises."""
    try:
        return decide()
    except ApiError as err:
        return err


@given(body=st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_any_object_is_a_call_or_a_400(body: dict[str, Any]) -> None:
    for parse in (parse_completion, parse_chat):
        outcome = _outcome(lambda: resolve(parse(body, parse_kv_transfer(body)), (1, 2), 32, 100))  # noqa: B023
        assert isinstance(outcome, SamplingParams) or outcome.status == 400


@given(body=st.binary(max_size=50) | st.text(max_size=50).map(str.encode))
def test_any_bytes_are_an_object_or_a_400(body: bytes) -> None:
    outcome = _outcome(lambda: decode_json(body))
    assert isinstance(outcome, dict) or outcome.status == 400


@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
def test_a_cache_salt_is_passed_on_and_never_empty(parse: Callable[..., Call]) -> None:
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}
    assert parse({**body, "cache_salt": "tenant"}, None).cache_salt == "tenant"
    for wrong in ("", "x" * 1025, 7):
        with pytest.raises(ApiError) as error:
            parse({**body, "cache_salt": wrong}, None)
        assert (error.value.status, error.value.param) == (400, "cache_salt")


def test_null_is_the_same_as_absent() -> None:
    names = [name for name in CompletionBody.__struct_fields__ if name != "max_tokens"]
    nulls = {**dict.fromkeys(names), "prompt": "x"}
    assert parse_completion(nulls, None) == parse_completion({"prompt": "x"}, None)


@pytest.mark.parametrize(
    ("body", "expected"),
    [({}, 16), ({"max_tokens": 5}, 5), ({"max_tokens": None}, 30)],
)
def test_max_tokens_of_a_completion(body: dict[str, Any], expected: int) -> None:
    call = parse_completion({"prompt": "x", **body}, None)
    assert resolve(call, (1, 2), 32, 100).max_tokens == expected


def test_max_tokens_of_a_chat_is_what_is_left() -> None:
    messages = [{"role": "user", "content": "x"}]
    call = parse_chat({"messages": messages}, None)
    assert resolve(call, (1, 2), 32, 100).max_tokens == 30
    call = parse_chat({"messages": messages, "max_tokens": 3, "max_completion_tokens": 4}, None)
    assert resolve(call, (1, 2), 32, 100).max_tokens == 4


def test_a_prompt_that_fills_the_context_is_refused() -> None:
    call = parse_completion({"prompt": "x", "max_tokens": None}, None)
    with pytest.raises(ApiError, match="maximum context length is 2") as caught:
        resolve(call, (1, 2), 2, 100)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, None),
        ({}, None),
        ({"do_remote_decode": False, "do_remote_prefill": False}, None),
        ({"do_remote_decode": True}, RemoteDecode()),
    ],
)
def test_whose_kv_comes_or_goes(params: object, expected: object) -> None:
    assert parse_kv_transfer({"kv_transfer_params": params}) == expected


def test_unsupported_fields_may_ask_for_nothing() -> None:
    refuse_unsupported({"presence_penalty": 0.0, "response_format": {"type": "text"}, "foo": 1})
    with pytest.raises(ApiError, match="response_format is not supported"):
        refuse_unsupported({"response_format": {"type": "json_object"}})


def _chat(params: dict[str, Any]) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "kv_transfer_params": params}


@pytest.mark.parametrize("leg", [PULL, {"do_remote_decode": True}, {}])
def test_token_ids_stand_for_a_chats_messages(leg: dict[str, Any]) -> None:
    body = _chat(leg | {"prompt_token_ids": [3, 4]})
    call = parse_chat(body, parse_kv_transfer(body))
    assert (call.prompts, call.messages) == (((3, 4),), None)
    with pytest.raises(ApiError, match="outside the vocabulary"):
        resolve(call, (3, 4), 32, 4)


@pytest.mark.parametrize(
    "params",
    [PULL, PULL | {"prompt_token_ids": None}, {"do_remote_decode": True}],
)
def test_a_chat_without_token_ids_is_rendered(params: dict[str, Any]) -> None:
    body = _chat(params)
    assert parse_chat(body, parse_kv_transfer(body)).messages is not None


@pytest.mark.parametrize("ids", [["a"], "ab", {"a": 1}, [1.5], 7])
def test_token_ids_that_are_none_are_refused(ids: object) -> None:
    body = _chat(PULL | {"prompt_token_ids": ids})
    with pytest.raises(ApiError) as caught:
        parse_chat(body, parse_kv_transfer(body))
    assert caught.value.param == "kv_transfer_params"
