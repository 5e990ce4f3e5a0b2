import json

import pytest

from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.response_ids import has_tag_of
from tandem_contract.transfer_params import ParamsUnusable
from tandem_sidecar.bodies.edit import with_response_id
from tandem_sidecar.connectors.nixl_push import NixlPush

from ..peers import PARAMS
from .bodies import ATTEMPT, BODY, KINDS, params_of

PUSHED = PARAMS[:-1] + b',"transfer_mode":"push"}'
ANSWER = b'{"choices":[],"kv_transfer_params":' + PUSHED + b"}"


@pytest.mark.parametrize("kind", KINDS)
def test_both_legs_have_one_id(kind: RequestKind) -> None:
    push, client_body = NixlPush(), with_response_id(kind, BODY, "d-0")
    legs = [
        push.prefill_body(kind, client_body, ATTEMPT),
        push.decode_body(kind, client_body, push.kv_hold(ATTEMPT, ANSWER)),
    ]
    first, second = (json.loads(leg).get("request_id") for leg in legs)
    assert first == second
    if kind is RequestKind.RESPONSES:
        # The client's id of the response, which still tells that d-0 stores it.
        assert has_tag_of(first, "d-0")
        assert first.endswith(f"-{ATTEMPT.attempt_id}")
        assert legs[1].count(b'"request_id"') == 1
    else:
        assert first is None
    assert b'"kv_transfer_params":' + PUSHED in legs[1]


@pytest.mark.parametrize("kind", KINDS)
def test_release_runs_the_request_for_one_token(kind: RequestKind) -> None:
    push = NixlPush()
    client_body = with_response_id(kind, BODY, "d-0")
    release = push.release_request(kind, client_body, push.kv_hold(ATTEMPT, ANSWER))
    assert release is not None
    assert (release.target, release.expected_status) == (PATHS[kind].encode(), 200)
    body = json.loads(release.body)
    assert params_of(release.body) == json.loads(PUSHED)
    assert (body["model"], body["stream"]) == ("m", False)
    if kind is RequestKind.RESPONSES:
        assert body["request_id"].endswith(f"-{ATTEMPT.attempt_id}")
        assert body["max_output_tokens"] == 1


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
