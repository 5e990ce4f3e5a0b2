"""The id of a stored response tells its engine; see `tandem_contract.response_ids`."""

import json
from typing import Any

import pytest

from tandem_contract.plan_keys import PlanKeys
from tandem_contract.response_ids import has_tag_of

from ..conftest import Harness
from ..peers import FakeResponses
from ..wire import Response, wire
from .test_ranks import Ranks, serving

CREATE: dict[str, Any] = {"model": "m", "input": "Hi"}


@pytest.mark.parametrize("split", [False, True])
async def test_the_decode_engine_gets_the_id_and_the_prefill_leg_does_not(
    harness: Harness, split: bool
) -> None:
    prefill = await harness.prefill()
    await harness.start()
    headers = harness.candidates if split else {}
    url = harness.url("/v1/responses")
    body = {**CREATE, "request_id": "resp_of_another_client"}
    async with harness.http.post(url, json=body, headers=headers) as answer:
        assert answer.status == 200
    (decode,) = harness.decode.requests
    assert has_tag_of(decode.json["request_id"], "decode-0")
    assert decode.body.count(b'"request_id"') == 1
    assert [leg.json.get("request_id") for leg in prefill.requests] == [None] * split


async def test_other_bodies_get_no_id(harness: Harness) -> None:
    await harness.start()
    body = b'{"model": "m", "prompt": "p"}'
    async with harness.http.post(harness.url(), data=body) as answer:
        assert answer.status == 200
    assert harness.decode.requests[0].body == body


async def ask(ranks: Ranks, rank: int, **body: Any) -> Response:
    """Create a response by the port of `rank`."""
    async with wire(ranks.listen._replace(port=ranks.listen.port + rank)) as client:
        client.post(json.dumps(CREATE | body).encode(), path="/v1/responses")
        return await client.response()


async def read(ranks: Ranks, rank: int, method: str, response_id: str) -> Response:
    """A request about a stored response by the port of `rank`."""
    async with wire(ranks.listen._replace(port=ranks.listen.port + rank)) as client:
        head = f"{method} /v1/responses/{response_id} HTTP/1.1\r\nhost: x\r\ncontent-length: 0"
        client.send(f"{head}\r\n\r\n".encode())
        return await client.response()


@pytest.mark.parametrize("pod_name", ["", "decode-0"])
async def test_a_lone_sidecar_finds_the_rank_that_stores_a_response(pod_name: str) -> None:
    async with serving(PlanKeys(None), FakeResponses, pod_name=pod_name) as ranks:
        created = await ask(ranks, 1)
        response_id = json.loads(created.body)["id"]
        for rank in (0, 1):
            assert (await ask(ranks, rank, previous_response_id=response_id)).status == 200
            assert (await read(ranks, rank, "GET", response_id)).body == created.body
            assert (await read(ranks, rank, "POST", f"{response_id}/cancel")).status == 200
        assert (await read(ranks, 0, "DELETE", response_id)).status == 200
        assert (await read(ranks, 1, "GET", response_id)).status == 404
        assert ranks.served[0] == 0


async def test_an_unknown_id_gets_the_engines_own_answer() -> None:
    async with serving(PlanKeys(None), FakeResponses) as ranks:
        for answer in (
            await ask(ranks, 1, previous_response_id="resp_unknown"),
            await read(ranks, 1, "GET", "resp_unknown"),
        ):
            assert answer.status == 404
            assert b"Response with id 'resp_unknown' not found." in answer.body
        # No text: it is the engine's to refuse.
        assert (await ask(ranks, 1, previous_response_id=[1])).status == 404
        assert ranks.served == [0, 3]
