from tandem_sidecar.bodies.kinds import Kind
from tandem_sidecar.connectors.offloading import Offloading

from .bodies import ATTEMPT, BODY, params_of


def test_both_legs_have_one_id() -> None:
    connector = Offloading()
    assert connector.together
    assert connector.inquiry(ATTEMPT) is None
    assert params_of(connector.prefill(Kind.CHAT, BODY, ATTEMPT)) == {
        "remote_decoder": {"kv_request_id": "r-1"},
        "do_remote_decode": True,
    }
    handover = connector.expected(ATTEMPT)
    assert params_of(connector.decode(Kind.CHAT, BODY, handover)) == {
        "remote_prefiller": {
            "kv_request_id": "r-1",
            "remote_host": "10.0.0.1",
            "remote_port": 7777,
        }
    }
    assert connector.release(Kind.CHAT, BODY, handover) is None


def test_what_the_prefill_found_cached_is_told_when_it_is_done() -> None:
    answer = b'{"usage":{"prompt_tokens_details":{"cached_tokens":32}}}'
    connector = Offloading(peer_port=5600)
    handover = connector.handover(ATTEMPT, answer)
    assert handover.cached_tokens == 32
    assert b'"remote_port":5600' in handover.params
