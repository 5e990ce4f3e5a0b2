import json

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import ParamsUnusable
from tandem_sidecar.bodies.parse import Body
from tandem_sidecar.connectors import ConnectorOptions
from tandem_sidecar.connectors.nixl import Nixl

from ..peers import PARAMS
from .bodies import ATTEMPT, BODY, KINDS, chat, params_of


def answer(params: bytes = PARAMS, more: bytes = b"") -> bytes:
    return b'{"choices":[],"kv_transfer_params":' + params + more + b"}"


def test_prefill_leg_is_capped_to_one_token() -> None:
    data = Nixl().prefill_body(RequestKind.COMPLETIONS, BODY, ATTEMPT)
    assert b'"seed":9007199254740993' in data
    leg = json.loads(data)
    assert leg == {
        "model": "m",
        "stream": False,
        "min_tokens": 1,
        "max_tokens": 1,
        "tools": [{"a": 1}],
        "seed": 9007199254740993,
        "ignore_eos": True,
        "kv_transfer_params": {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        },
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_asks_for_a_kv_hold_and_reads_it_alike(kind: RequestKind) -> None:
    assert params_of(Nixl().prefill_body(kind, BODY, ATTEMPT))["do_remote_decode"] is True
    kv_hold = Nixl().kv_hold(ATTEMPT, answer())
    assert Nixl().decode_body(kind, BODY, kv_hold) == (
        BODY.data[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"
    )


@pytest.mark.parametrize("kind", KINDS)
def test_release_is_a_completion_that_is_refused(kind: RequestKind) -> None:
    release = Nixl().release_request(kind, BODY, Nixl().kv_hold(ATTEMPT, answer()))
    assert release is not None
    assert PARAMS in release.body
    assert json.loads(release.body)["model"] != "m"
    assert (release.target, release.expected_status) == (b"/v1/completions", 404)


UNUSABLE = [b"null", b"3", b"[]", b'{"do_remote_prefill":true}', PARAMS[:-1] + b',"remote_port":0}']


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b"\xff", *map(answer, UNUSABLE)])
def test_an_answer_without_params_is_unusable(body: bytes) -> None:
    with pytest.raises(ParamsUnusable):
        Nixl().kv_hold(ATTEMPT, body)


def test_a_producer_that_pushes_is_unusable_to_one_that_pulls() -> None:
    pushed = PARAMS[:-1] + b',"transfer_mode":"push"}'
    with pytest.raises(ParamsUnusable, match="transfer_mode is push"):
        Nixl().kv_hold(ATTEMPT, answer(pushed))
    assert Nixl().kv_hold(ATTEMPT, answer(PARAMS[:-1] + b',"transfer_mode":"pull"}'))


def test_an_address_that_only_the_prefill_pod_itself_reaches_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The decode engine may run on the prefill engine's machine, so the KV is not refused."""
    params = json.loads(PARAMS)
    connector = Nixl()
    for host in ("10.0.0.1", "localhost", "127.0.0.1"):
        connector.kv_hold(ATTEMPT, answer(json.dumps(params | {"remote_host": host}).encode()))
    (record,) = caplog.records
    assert "10.0.0.1:8000 names localhost" in record.getMessage()
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST" in record.getMessage()
    assert connector.loopback_sources == {ATTEMPT.prefill}


USAGE = b',"usage":{"prompt_tokens":9,"prompt_tokens_details":%b}'


@pytest.mark.parametrize(
    ("more", "cached"),
    [(USAGE % b'{"cached_tokens":7}', 7), (USAGE % b"null", 0), (b"", 0)],
)
def test_cached_tokens_come_from_the_usage_if_the_params_lack_them(
    more: bytes, cached: int
) -> None:
    assert Nixl().kv_hold(ATTEMPT, answer(more=more)).cached_tokens == cached
    params = PARAMS[:-1] + b',"remote_prefill_cached_tokens":5}'
    assert Nixl().kv_hold(ATTEMPT, answer(params, more)).cached_tokens is None


IDS = b',"prompt_token_ids":[1, 22 ,333]'


def test_a_chat_is_tokenized_once() -> None:
    body = chat("hi")
    assert (
        json.loads(Nixl().prefill_body(RequestKind.CHAT, body, ATTEMPT))["return_token_ids"] is True
    )
    kv_hold = Nixl().kv_hold(ATTEMPT, answer(more=IDS))
    leg = Nixl().decode_body(RequestKind.CHAT, body, kv_hold)
    assert leg.endswith(PARAMS[:-1] + b',"prompt_token_ids":[1, 22 ,333]}}')
    release = Nixl().release_request(RequestKind.CHAT, body, kv_hold)
    assert release is not None
    assert b"prompt_token_ids" not in release.body


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (RequestKind.COMPLETIONS, chat("hi", return_token_ids=True)),
        (RequestKind.MESSAGES, chat("hi")),
        (RequestKind.CHAT, chat([{"type": "image_url", "image_url": {"url": "data:x"}}])),
        (RequestKind.CHAT, chat([{"type": "input_audio"}, {"type": "text", "text": "x"}])),
        (RequestKind.CHAT, chat([{"text": "x"}])),
        (RequestKind.CHAT, chat("hi", echo=True)),
        (RequestKind.CHAT, chat("hi", return_prompt_text=True)),
        (RequestKind.CHAT, BODY),
    ],
)
def test_chats_that_must_be_rendered_are_tokenized_twice(kind: RequestKind, body: Body) -> None:
    assert "return_token_ids" not in json.loads(Nixl().prefill_body(kind, body, ATTEMPT))


@pytest.mark.parametrize("more", [b"", b',"prompt_token_ids":null', b',"prompt_token_ids":[ ]'])
def test_missing_token_ids_are_not_sent_to_decode(more: bytes) -> None:
    kv_hold = Nixl().kv_hold(ATTEMPT, answer(more=more))
    assert b"prompt_token_ids" not in Nixl().decode_body(RequestKind.CHAT, chat("hi"), kv_hold)


def test_tokenize_once_can_be_turned_off() -> None:
    leg = Nixl(ConnectorOptions(tokenize_once=False)).prefill_body(
        RequestKind.CHAT, chat("x", return_token_ids=True), ATTEMPT
    )
    assert "return_token_ids" not in json.loads(leg)
