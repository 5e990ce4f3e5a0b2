"""Several models and LoRA adapters behind one router."""

import json

import pytest

from tandem_contract.headers import MODEL_REWRITES

from .conftest import DECODE, PATH, PREFILL, PROMPT, Harness


async def test_each_model_and_adapter_has_its_own_backends(harness: Harness) -> None:
    await harness.prefill("p-a", models=["a", "a-lora"])
    await harness.decode("d-a", models=["a", "a-lora"])
    await harness.unified("u-b", models=["b"])
    await harness.start()
    for model in ("a", "a-lora"):
        response, _ = await harness.ask({"model": model, "prompt": PROMPT})
        assert (response.headers[PREFILL], response.headers[DECODE]) == ("p-a", "d-a")
    response, _ = await harness.ask({"model": "b", "prompt": PROMPT})
    assert (response.headers[PATH], response.headers[DECODE]) == ("unified", "u-b")
    response, body = await harness.ask({"model": "c", "prompt": PROMPT})
    assert response.status == 404
    assert "`c` does not exist" in json.loads(body)["error"]["message"]
    async with harness.http.get(harness.url("/v1/models")) as answer:
        names = [model["id"] for model in (await answer.json())["data"]]
    assert sorted(names) == ["a", "a-lora", "b"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings"])
async def test_a_replaced_model_reaches_the_engine(harness: Harness, path: str) -> None:
    engine = await harness.unified("u", models=["b"])
    await harness.start()
    body = {"model": "a", "prompt": PROMPT, "input": "x"}
    await harness.ask(body, path, headers={MODEL_REWRITES[0]: "b"})
    assert engine.requests[-1].json["model"] == "b"


async def test_a_body_that_is_no_request_is_refused(harness: Harness) -> None:
    decode = await harness.unified("u")
    await harness.start()
    for data in (b"{", b"[]", b'{"prompt": 17, "model": {}}'):
        async with harness.http.post(harness.url(), data=data) as answer:
            assert answer.status == 400
            assert "message" in (await answer.json(content_type=None))["error"]
    assert not decode.requests
