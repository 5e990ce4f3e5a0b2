import json

import msgspec
import pytest

from tandem_contract.kv_reference import KvReference
from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import ParamsUnusable
from tandem_sidecar.connectors.protocol import ConnectorOptions
from tandem_sidecar.connectors.storage import Storage

from .bodies import ATTEMPT, BODY, KINDS, chat

KEY = "ab" * 32
REFERENCE = msgspec.to_builtins(KvReference(f"ns/{KEY}", KEY, 512))


def answer(params: object, **fields: object) -> bytes:
    return json.dumps({"kv_transfer_params": params, **fields}).encode()


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_is_asked_to_store_and_decode_to_load_in_the_requests_time(
    kind: RequestKind,
) -> None:
    connector, attempt = Storage(), msgspec.structs.replace(ATTEMPT, transfer_timeout=2.5)
    prefill = json.loads(connector.prefill_body(kind, BODY, attempt))
    assert prefill["kv_transfer_params"] == {"tandem_kv_store": {"timeout": 2.5}}
    assert prefill["stream"] is False
    kv_hold = connector.kv_hold(attempt, answer({"tandem_kv_reference": REFERENCE}))
    decode = json.loads(connector.decode_body(kind, BODY, kv_hold))
    assert decode["kv_transfer_params"] == {
        "tandem_kv_reference": REFERENCE,
        "tandem_kv_load_timeout": 2.5,
    }
    assert connector.release_request(kind, BODY, kv_hold) is None


def test_a_chat_is_tokenized_once() -> None:
    body = chat("hi")
    connector = Storage()
    assert b"return_token_ids" in connector.prefill_body(RequestKind.CHAT, body, ATTEMPT)
    kv_hold = connector.kv_hold(
        ATTEMPT, answer({"tandem_kv_reference": REFERENCE}, prompt_token_ids=[1, 2])
    )
    params = json.loads(connector.decode_body(RequestKind.CHAT, body, kv_hold))
    assert params["kv_transfer_params"]["prompt_token_ids"] == [1, 2]
    off = Storage(ConnectorOptions(tokenize_once=False))
    assert b"return_token_ids" not in off.prefill_body(RequestKind.CHAT, body, ATTEMPT)


@pytest.mark.parametrize("params", [None, {}, {"tandem_kv_not_stored": "short"}])
def test_without_a_reference_the_decode_body_is_the_clients(params: object) -> None:
    kv_hold = Storage().kv_hold(ATTEMPT, answer(params, prompt_token_ids=[1]))
    assert Storage().decode_body(RequestKind.COMPLETIONS, BODY, kv_hold) == BODY.data


@pytest.mark.parametrize("reason", ["timeout", "breaker_open", "full", "not_configured"])
def test_kv_that_could_not_be_stored_is_a_failed_transfer(reason: str) -> None:
    with pytest.raises(ParamsUnusable, match=f"did not store the prompt's KV: {reason}"):
        Storage().kv_hold(ATTEMPT, answer({"tandem_kv_not_stored": reason}))


@pytest.mark.parametrize(
    "reference",
    [[], {**REFERENCE, "tensor_format": "tandem-kv/0"}, {**REFERENCE, "path": "ns/other"},
     {**REFERENCE, "endpoint": "http://elsewhere"}],
)  # fmt: skip
def test_a_reference_that_cannot_be_used_is_a_failed_transfer(reference: object) -> None:
    with pytest.raises(ParamsUnusable, match="kv_transfer_params"):
        Storage().kv_hold(ATTEMPT, answer({"tandem_kv_reference": reference}))


def test_cached_tokens_come_from_the_prefills_answer() -> None:
    body = answer(None, usage={"prompt_tokens_details": {"cached_tokens": 32}})
    assert Storage().kv_hold(ATTEMPT, body).cached_tokens == 32


@pytest.mark.parametrize("body", [b"", b"[]", b"<html>"])
def test_an_answer_of_no_engine_is_a_failed_prefill(body: bytes) -> None:
    with pytest.raises(ParamsUnusable):
        Storage().kv_hold(ATTEMPT, body)
