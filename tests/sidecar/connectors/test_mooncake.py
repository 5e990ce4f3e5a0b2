import json

import pytest

from tandem_contract.commandline import HostPort
from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import ParamsUnusable
from tandem_sidecar.connectors.mooncake import Mooncake
from tandem_sidecar.connectors.protocol import HandoffAttempt, PeerQuery

from .bodies import ATTEMPT, BODY, params_of

REGISTRY = b'{"0":{"engine_id":"engine-p","worker_addr":{"0":{"0":"tcp://10.0.0.1:4711"}}}}'
ENDED = b'{"choices":[{"finish_reason":"length"}],"usage":{"prompt_tokens_details":null}}'


def learned(answer: bytes = REGISTRY) -> Mooncake:
    connector = Mooncake()
    connector.record_peer(ATTEMPT, answer)
    return connector


def test_the_bootstrap_server_of_each_pod_is_queried_once() -> None:
    connector = Mooncake()
    query = PeerQuery(HostPort("10.0.0.1", 8998), b"/query")
    assert connector.peer_query(ATTEMPT) == query
    with pytest.raises(ParamsUnusable):
        connector.expected_kv_hold(ATTEMPT)
    connector.record_peer(ATTEMPT, REGISTRY)
    assert connector.peer_query(ATTEMPT) is None
    assert connector.peer_query(HandoffAttempt("r-2", HostPort("10.0.0.2", 8000))) is not None
    connector.forget_peer(ATTEMPT.prefill)
    assert connector.peer_query(ATTEMPT) == query


def test_a_restart_under_the_same_address_is_detected() -> None:
    now = 100.0
    connector = Mooncake(clock=lambda: now)
    connector.record_peer(ATTEMPT, REGISTRY)
    now = 109.0
    assert connector.peer_query(ATTEMPT) is None
    now = 111.0
    assert connector.peer_query(ATTEMPT) is not None
    connector.record_peer(ATTEMPT, REGISTRY.replace(b"engine-p", b"engine-q"))
    assert b"engine-q" in connector.expected_kv_hold(ATTEMPT).transfer_params


def test_both_legs_have_one_transfer_id() -> None:
    connector = learned()
    assert params_of(connector.prefill_body(RequestKind.CHAT, BODY, ATTEMPT)) == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_id": "r-1",
    }
    kv_hold = connector.expected_kv_hold(ATTEMPT)
    assert params_of(connector.decode_body(RequestKind.CHAT, BODY, kv_hold)) == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "transfer_id": "r-1",
        "remote_bootstrap_addr": "http://10.0.0.1:8998",
        "remote_engine_id": "engine-p",
    }
    release = connector.release_request(RequestKind.CHAT, BODY, kv_hold)
    assert release is not None
    assert (release.target, release.expected_status) == (b"/v1/completions", 404)
    assert params_of(release.body) == json.loads(kv_hold.transfer_params)


@pytest.mark.parametrize(
    "answer",
    [b"", b"[]", b"{}", b'{"0":{}}', b'{"0":{"engine_id":"a"},"1":{"engine_id":"b"}}', b"\xff"],
)
def test_a_bootstrap_answer_without_exactly_one_engine_id_is_unusable(answer: bytes) -> None:
    with pytest.raises(ParamsUnusable):
        learned(answer)


def test_a_prefill_that_ended_by_length_holds_kv() -> None:
    kv_hold = learned().kv_hold(ATTEMPT, ENDED)
    assert kv_hold.transfer_params == learned().expected_kv_hold(ATTEMPT).transfer_params
    assert kv_hold.cached_tokens == 0


@pytest.mark.parametrize(
    "answer",
    [
        b'{"choices":[{"finish_reason":"stop"}]}',
        b'{"stop_reason":"end_turn"}',
        b'{"status":"completed"}',
        b"",
    ],
)
def test_a_prefill_that_ended_otherwise_is_unusable(answer: bytes) -> None:
    with pytest.raises(ParamsUnusable):
        learned().kv_hold(ATTEMPT, answer)


@pytest.mark.parametrize("answer", [b'{"stop_reason":"max_tokens"}', b'{"status":"incomplete"}'])
def test_the_end_by_length_is_read_in_every_api(answer: bytes) -> None:
    assert learned().kv_hold(ATTEMPT, answer)
