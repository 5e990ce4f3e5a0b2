from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.connectors import ConnectorOptions
from tandem_sidecar.connectors.offloading import Offloading

from .bodies import ATTEMPT, BODY, params_of


def test_both_legs_have_one_id() -> None:
    connector = Offloading()
    assert params_of(connector.prefill_body(RequestKind.CHAT, BODY, ATTEMPT)) == {
        "remote_decoder": {"kv_request_id": "r-1"},
        "do_remote_decode": True,
    }
    kv_hold = connector.expected_kv_hold(ATTEMPT)
    assert params_of(connector.decode_body(RequestKind.CHAT, BODY, kv_hold)) == {
        "remote_prefiller": {
            "kv_request_id": "r-1",
            "remote_host": "10.0.0.1",
            "remote_port": 7777,
        }
    }
    assert connector.release_request(RequestKind.CHAT, BODY, kv_hold) is None


def test_cached_tokens_come_from_the_prefills_answer() -> None:
    answer = b'{"usage":{"prompt_tokens_details":{"cached_tokens":32}}}'
    connector = Offloading(ConnectorOptions(peer_port=5600))
    kv_hold = connector.kv_hold(ATTEMPT, answer)
    assert kv_hold.cached_tokens == 32
    assert b'"remote_port":5600' in kv_hold.transfer_params
