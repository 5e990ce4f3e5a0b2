import json

import pytest

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.transfer_params import ParamsUnusable
from tandem_sidecar.connectors.nixl_push import NixlPush

from ..peers import PARAMS
from .bodies import ATTEMPT, BODY, KINDS, params_of

PUSHED = PARAMS[:-1] + b',"transfer_mode":"push"}'
ANSWER = b'{"choices":[],"kv_transfer_params":' + PUSHED + b"}"


@pytest.mark.parametrize("kind", KINDS)
def test_both_legs_have_one_id(kind: RequestKind) -> None:
    push = NixlPush()
    legs = [
        push.prefill_body(kind, BODY, ATTEMPT),
        push.decode_body(kind, BODY, push.kv_hold(ATTEMPT, ANSWER)),
    ]
    in_body = "resp_r-1" if kind is RequestKind.RESPONSES else None
    assert [json.loads(leg).get("request_id") for leg in legs] == [in_body, in_body]
    assert b'"kv_transfer_params":' + PUSHED in legs[1]


@pytest.mark.parametrize("kind", KINDS)
def test_release_runs_the_request_for_one_token(kind: RequestKind) -> None:
    push = NixlPush()
    release = push.release_request(kind, BODY, push.kv_hold(ATTEMPT, ANSWER))
    assert release is not None
    assert (release.target, release.expected_status) == (PATHS[kind].encode(), 200)
    body = json.loads(release.body)
    assert params_of(release.body) == json.loads(PUSHED)
    assert (body["model"], body["stream"]) == ("m", False)
    if kind is RequestKind.RESPONSES:
        assert (body["request_id"], body["max_output_tokens"]) == ("resp_r-1", 1)


@pytest.mark.parametrize(
    "params",
    [
        PUSHED.replace(b'"tp_size": 1,', b""),
        PARAMS[:-1] + b',"transfer_mode":"pull"}',
    ],
)
def test_a_producer_that_decode_cannot_register_with_is_unusable(params: bytes) -> None:
    with pytest.raises(ParamsUnusable):
        NixlPush().kv_hold(ATTEMPT, b'{"kv_transfer_params":' + params + b"}")
