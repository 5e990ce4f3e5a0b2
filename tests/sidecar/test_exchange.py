"""Each row of the failure table, over real sockets."""



from .conftest import World
from .peers import PARAMS

BODY = (
    b'{"model": "m", "prompt": "Hi", "seed": 9007199254740993,  "zeta": [1.0, 2e5], "alpha": null}'
)
STREAM = b'{"model":"m","prompt":"Hi","stream":true}'
PATH = "X-Continuum-Routing-Path"


async def test_split_hands_the_producers_object_over_verbatim(world: World) -> None:
    prefill = await world.prefill()
    await world.start()
    async with world.http.post(world.url(), data=BODY, headers=world.split) as answer:
        assert answer.status == 200
        assert await answer.json() == {"choices": [{"text": "hello"}]}
        assert answer.headers[PATH] == "prefill_then_decode"
        assert answer.headers["X-Continuum-Prefill-Backend"] == str(prefill.address)
        assert answer.headers["X-Continuum-Decode-Backend"] == "decode-0"
        assert answer.headers["x-tandem-timing"] == (
            "queue=0.500000;compute=1.250000;cached=7;computed=9;transfer=0.125000;bytes=4096"
        )
    [sent] = world.decode.requests
    assert sent.body == BODY[:-1] + b',"kv_transfer_params":' + PARAMS + b"}"
    [leg] = prefill.requests
    assert leg.json["max_tokens"] == leg.json["min_tokens"] == 1
    assert b'"seed":9007199254740993' in leg.body
    assert leg.headers["x-request-id"] == sent.headers["x-request-id"]
    assert (
        await world.metric('disaggregated_requests_total{routing_path="prefill_then_decode"}') == 1
    )
    assert await world.metric("disaggregated_kv_transfer_duration_seconds_sum") == 0.125
    assert await world.metric("tandem_sidecar_in_flight") == 0
