"""kv_transfer_params: which objects name KV that can be read, and which do not."""

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract.transfer_params import (
    CLIENT_FORBIDDEN,
    FIELD,
    PREFILL_LEG,
    ParamsUnusable,
    TransferParams,
    read_transfer_params,
    transfer_params_from_object,
)

ANSWER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "engine-1",
    "remote_request_id": "cmpl-1",
    "remote_host": "10.0.0.7",
    "remote_port": 5600,
    "remote_block_ids": [[4, 5, 9]],
    "remote_num_tokens": 40,
    "remote_prefill_cached_tokens": 16,
    "tp_size": 2,
}
REQUIRED = (
    "remote_engine_id", "remote_request_id", "remote_host", "remote_port", "remote_block_ids",
)  # fmt: skip


def encoded(**changes: Any) -> bytes:
    return json.dumps({**ANSWER, **changes}).encode()


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in ANSWER.items() if key != name}


def test_every_field_a_reader_needs_is_read() -> None:
    assert transfer_params_from_object(ANSWER) == TransferParams(
        remote_engine_id="engine-1",
        remote_request_id="cmpl-1",
        remote_host="10.0.0.7",
        remote_port=5600,
        remote_block_ids=((4, 5, 9),),
        remote_num_tokens=40,
        remote_prefill_cached_tokens=16,
        tp_size=2,
    )


def test_unknown_fields_do_no_harm() -> None:
    params = read_transfer_params(b'{"big": 18446744073709551617,' + encoded(future={"a": [1]})[1:])
    assert params.remote_port == 5600


def test_null_fields_count_as_absent() -> None:
    params = transfer_params_from_object({**ANSWER, "remote_num_tokens": None, "tp_size": None})
    assert params.remote_num_tokens is None
    assert params.tp_size is None
    assert params.encode()["tp_size"] == 1


@pytest.mark.parametrize(
    ("blocks", "groups"),
    [
        ([4, 5, 9], ((4, 5, 9),)),
        ([[4, 5], [9]], ((4, 5), (9,))),
        ([[4], []], ((4,), ())),
        ([0], ((0,),)),
    ],
)
def test_blocks_are_read_flat_and_grouped(
    blocks: list[Any], groups: tuple[tuple[int, ...], ...]
) -> None:
    assert read_transfer_params(encoded(remote_block_ids=blocks)).remote_block_ids == groups
    object_ = {**ANSWER, "remote_block_ids": blocks}
    assert transfer_params_from_object(object_).remote_block_ids == groups


@pytest.mark.parametrize("name", REQUIRED)
@pytest.mark.parametrize("absence", ["absent", "null"])
def test_a_missing_field_is_named(name: str, absence: str) -> None:
    value = without(name) if absence == "absent" else {**ANSWER, name: None}
    with pytest.raises(ParamsUnusable, match=rf"{FIELD}\.{name} is missing"):
        read_transfer_params(json.dumps(value).encode())
    with pytest.raises(ParamsUnusable, match=rf"{FIELD}\.{name} is missing"):
        transfer_params_from_object(value)


@pytest.mark.parametrize("blocks", [[], [[]], [[], []]])
def test_params_without_a_block_name_nothing_to_pull(blocks: list[Any]) -> None:
    with pytest.raises(ParamsUnusable, match="remote_block_ids"):
        read_transfer_params(encoded(remote_block_ids=blocks))


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_a_port_outside_the_range_is_unusable(port: int) -> None:
    with pytest.raises(ParamsUnusable, match="remote_port"):
        read_transfer_params(encoded(remote_port=port))


def test_an_answer_that_does_not_offer_its_kv_is_unusable() -> None:
    with pytest.raises(ParamsUnusable, match="do_remote_prefill"):
        read_transfer_params(encoded(do_remote_prefill=False))


@pytest.mark.parametrize(
    "raw",
    [
        b"null", b"[]", b"3", b"", b"{", b"\xff", b'{"do_remote_prefill": 1}',
        b'{"remote_port": "5600"}', b'{"remote_block_ids": ["a"]}', b'{"remote_host": "\xff"}',
        b'{"more": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)  # fmt: skip
def test_a_value_that_is_no_params_object_is_unusable(raw: bytes) -> None:
    with pytest.raises(ParamsUnusable, match=FIELD):
        read_transfer_params(raw)


def test_an_object_of_wrong_types_is_unusable() -> None:
    with pytest.raises(ParamsUnusable, match="remote_host"):
        transfer_params_from_object({**ANSWER, "remote_host": 7})


@given(st.binary(max_size=80))
def test_any_bytes_give_params_or_params_unusable(raw: bytes) -> None:
    with contextlib.suppress(ParamsUnusable):
        assert read_transfer_params(raw).remote_block_ids


def test_what_a_producer_encodes_a_reader_parses() -> None:
    params = transfer_params_from_object(ANSWER)
    written = params.encode(transfer_mode="pull")
    assert read_transfer_params(json.dumps(written).encode()).transfer_mode == "pull"
    assert transfer_params_from_object(written) == replace(params, transfer_mode="pull")


def test_the_prefill_leg_offers_and_asks_for_nothing() -> None:
    leg = json.loads(PREFILL_LEG)
    assert leg.pop("do_remote_decode") is True
    assert leg.pop("do_remote_prefill") is False
    assert set(leg.values()) == {None}


def test_a_client_may_not_send_the_params() -> None:
    assert FIELD in CLIENT_FORBIDDEN
