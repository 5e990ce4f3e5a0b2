"""The four routing paths and their headers, as the router's document describes them."""

import json

from .conftest import DECODE, PATH, PREFILL, PROMPT, Harness


async def test_a_prompt_is_prefilled_on_one_backend_and_decoded_on_another(
    harness: Harness,
) -> None:
    prefill = await harness.prefill("prefill-worker-1")
    decode = await harness.decode("decode-worker-1")
    await harness.start()
    response, body = await harness.ask()
    assert response.status == 200
    assert json.loads(body) == {"choices": [{"text": "hello"}]}
    assert response.headers[PATH] == "prefill_then_decode"
    assert response.headers[PREFILL] == "prefill-worker-1"
    assert response.headers[DECODE] == "decode-worker-1"
    (sent,) = prefill.requests
    assert sent.json["max_tokens"] == 1
    (received,) = decode.requests
    assert received.json["kv_transfer_params"]["remote_engine_id"] == "engine-p"
    # The engine's own times are for the picker, not for clients.
    assert "x-tandem-timing" not in response.headers


async def test_a_cached_prompt_is_decoded_at_once(harness: Harness) -> None:
    prefill = await harness.prefill("p")
    await harness.decode("d")
    await harness.start()
    await harness.ask()
    response, _ = await harness.ask()
    assert response.headers[PATH] == "fast_decode"
    assert response.headers[DECODE] == "d"
    assert PREFILL not in response.headers
    assert len(prefill.requests) == 1


async def test_without_disaggregated_backends_the_path_is_unified(harness: Harness) -> None:
    await harness.unified("one")
    await harness.start()
    response, _ = await harness.ask()
    assert (response.headers[PATH], response.headers[DECODE]) == ("unified", "one")


async def test_a_stream_is_relayed(harness: Harness) -> None:
    await harness.prefill("p")
    await harness.decode("d")
    await harness.start()
    body = {"model": "m", "prompt": PROMPT, "stream": True}
    response, data = await harness.ask(body)
    assert response.headers[PATH] == "prefill_then_decode"
    assert [line for line in data.decode().splitlines() if line] == [
        'data: {"text": "one"}',
        'data: {"text": "two"}',
        "data: [DONE]",
    ]
