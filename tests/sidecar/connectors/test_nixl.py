import json

import pytest

from tandem_contract.commandline import HostPort
from tandem_contract.kvparams import ParamsUnusable
from tandem_sidecar.bodies.parse import Kind, parse_body
from tandem_sidecar.connectors.handover import Attempt
from tandem_sidecar.connectors.nixl import Nixl

from ..peers import PARAMS

ATTEMPT = Attempt("r-1", HostPort("10.0.0.1", 8000))
BODY = parse_body(
    b'{"model":"m","stop":["x"],"stop_token_ids":[1],"stream":true,"stream_options":{},'
    b'"min_tokens":5,"max_tokens":100,"tools":[{"a":1}],"seed":9007199254740993}'
)


def test_prefill_leg_is_capped_to_one_token() -> None:
    data = Nixl().prefill(Kind.COMPLETIONS, BODY, ATTEMPT)
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


def test_chat_is_capped_under_both_names() -> None:
    leg = json.loads(Nixl().prefill(Kind.CHAT, BODY, ATTEMPT))
    assert leg["max_completion_tokens"] == leg["max_tokens"] == 1


def test_decode_leg_holds_the_producers_object_verbatim() -> None:
    handover = Nixl().handover(ATTEMPT, b'{"choices":[],"kv_transfer_params":' + PARAMS + b"}")
    assert Nixl().decode(Kind.CHAT, BODY, handover) == (
        BODY.data[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"
    )
    release = Nixl().release(Kind.CHAT, BODY, handover)
    assert PARAMS in release.body
    assert json.loads(release.body)["model"] != "m"
    assert (release.target, release.expected) == (b"/v1/completions", 404)


@pytest.mark.parametrize("answer", [b"", b"[]", b"{}", b'{"kv_transfer_params":3}', b"\xff"])
def test_an_answer_without_params_is_unusable(answer: bytes) -> None:
    with pytest.raises(ParamsUnusable):
        Nixl().handover(ATTEMPT, answer)
