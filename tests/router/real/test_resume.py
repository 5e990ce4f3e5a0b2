"""A stream goes on at another engine after its own was killed, with the same tokens."""

import json
from pathlib import Path

import pytest

from tandem_contract.request_kinds import PATHS, RequestKind

from ...sidecar.real.client import Stream, open_response
from ...sidecar.real.engine import Engine
from ...sidecar.real.pair import call, expected_tokens
from .conftest import routed
from .test_failures import backends, busy_backend

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]
TOKENS = 60


@pytest.mark.parametrize("unified", [False, True])
async def test_a_stream_survives_the_death_of_its_engine(
    shared: dict[str, Engine], tmp_path: Path, unified: bool
) -> None:
    prefill = () if unified else ("prefill-0",)
    engines = await backends(shared, *prefill, "decode-0", "decode-1")
    async with routed(tmp_path / "router.yaml", engines, "--resume") as router:
        request = call(80 + unified, tokens=TOKENS, stream=True)
        async with open_response(router.http, router.url, request) as response:
            stream = Stream(response)
            await stream.wait_for_first_bytes()
            shared[await busy_backend(router, "decode")].kill()
            result = await stream.read_to_end()
        assert (result.status, result.error) == (200, "")
        assert result.tokens == expected_tokens(request)


@pytest.mark.parametrize("unified", [False, True])
async def test_a_chat_survives_the_death_of_its_engine(
    shared: dict[str, Engine], tmp_path: Path, unified: bool
) -> None:
    """Its tokens are bytes, so that most texts are held back within a character at some time."""
    prefill = () if unified else ("prefill-0",)
    engines = await backends(shared, *prefill, "decode-0", "decode-1")
    messages = [{"role": "user", "content": f"Tell me of rivers, {unified}. " * 8}]
    body = {"messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with routed(tmp_path / "router.yaml", engines, "--resume") as router:
        url = f"{router.url}{PATHS[RequestKind.CHAT]}"
        async with router.http.post(url, json=body) as response:
            expected = await response.json()
        async with router.http.post(url, json=body | options) as response:
            first = await response.content.readline()
            shared[await busy_backend(router, "decode")].kill()
            rest = await response.read()
    *events, usage = [json.loads(data) for data in data_of(first + rest)]
    assert [event["choices"][0]["delta"].get("role") for event in events].count("assistant") == 1
    text = "".join(event["choices"][0]["delta"]["content"] for event in events)
    assert text == expected["choices"][0]["message"]["content"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][count] == expected["usage"][count]


def data_of(stream: bytes) -> list[bytes]:
    """The data of the events of a stream, which is complete, without its end."""
    *events, done, rest = stream.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    return [event.removeprefix(b"data: ") for event in events]
