import json

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import ParamsUnusable
from tandem_sidecar.connectors.lmcache import LmCache

from .bodies import ATTEMPT, BODY, KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_no_leg_names_kv(kind: RequestKind) -> None:
    connector = LmCache()
    prefill = json.loads(connector.prefill_body(kind, BODY, ATTEMPT))
    assert "kv_transfer_params" not in prefill
    assert prefill["stream"] is False
    kv_hold = connector.kv_hold(ATTEMPT, b"{}")
    assert connector.decode_body(kind, BODY, kv_hold) == BODY.data
    assert connector.release_request(kind, BODY, kv_hold) is None


def test_cached_tokens_come_from_the_prefills_answer() -> None:
    """The decode engine counts what it loaded from the store as cached."""
    answer = b'{"usage":{"prompt_tokens_details":{"cached_tokens":32}}}'
    assert LmCache().kv_hold(ATTEMPT, answer).cached_tokens == 32


@pytest.mark.parametrize("answer", [b"", b"[]", b"<html>"])
def test_an_answer_of_no_engine_is_a_failed_prefill(answer: bytes) -> None:
    with pytest.raises(ParamsUnusable):
        LmCache().kv_hold(ATTEMPT, answer)
