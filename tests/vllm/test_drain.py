"""A stream that moves because its pod drains: its KV is read from that pod's real engine.

The operator renders that engine as a `kv_consumer`; it also hands off when it is asked to.
"""

import time
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract import metrics
from tandem_contract.metrics import PromptSource
from tandem_contract.plan import Target

from ..router.real.same_stream import Streamed, read_stream
from ..sidecar.processes import drain, sidecar
from ..sidecar.real.test_resume import plan, with_keys
from .api_requests import KINDS
from .pairs import Moved, Pair
from .test_unified import TIMES

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

TOKENS = 400
BLOCK = 32
"""Tokens of a KV block, as the pools of `make_pair` say."""


@pytest.mark.parametrize("name", ["completions", "chat"])
async def test_the_engine_of_a_pod_that_drains_hands_off_its_kv(
    pair: Pair, http: aiohttp.ClientSession, tmp_path: Path, name: str
) -> None:
    """It goes on at the engine of the prefill pod, which here has a sidecar as a decode pod has."""
    flags = (*with_keys(tmp_path), *TIMES)
    kind = KINDS[name]
    asked: dict[str, Any] = {
        **kind.body(f"{name} of a lighthouse. " + "who lives in it? " * 20),
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    first_url, next_url = f"http://{pair.decode.address}", f"http://{pair.prefill.address}"
    async with (
        sidecar(*flags, "--engine", first_url, "--pod-name", "decode-0") as first,
        sidecar(*flags, "--engine", next_url, "--pod-name", "decode-1") as other,
    ):
        # It refuses connections: the decode engine alone has the prompt's KV.
        prefills = (Target("prefill-0", "127.0.0.1:1"),)
        alternate = Target("decode-1", str(other.listen))
        routed = plan(tmp_path, first, "decode-0", f"r-{name}", prefills, alternate)
        async with http.post(first.url(kind.path), json=asked, headers=routed) as response:
            assert response.status == 200
            begin = b"".join([await response.content.readuntil(b"\n\n") for _ in range(40)])
            drained, taken = [
                await Moved(http, engine.url("/metrics")).begin()
                for engine in (pair.decode, pair.prefill)
            ]
            await drain(first.admin, wait=True)
            got = read_stream(begin + await response.read())
            drained_by, taken_by = await by_source(drained), await by_source(taken)
        whole = await alone(http, next_url + kind.path, asked)
    assert got.is_complete
    assert got.joined("token_ids") == whole.joined("token_ids") != []
    assert got.ends == whole.ends
    prompt = len(whole.joined("prompt_token_ids"))
    assert drained_by[PromptSource.CACHED] > prompt
    assert 0 < drained_by[PromptSource.COMPUTED] <= BLOCK
    assert taken_by[PromptSource.EXTERNAL] > prompt
    assert taken_by[PromptSource.COMPUTED] <= 1


async def by_source(moved: Moved) -> dict[PromptSource, float]:
    """The tokens of an engine's prompts since then, by where their KV came from."""
    name = metrics.ENGINE_PROMPT_BY_SOURCE
    return {each: await moved.by(name, source=each) for each in PromptSource}


async def alone(http: aiohttp.ClientSession, url: str, asked: dict[str, Any]) -> Streamed:
    """The stream of an engine that computes all of it: no engine has KV of this salt."""
    body = {**asked, "cache_salt": f"alone-{time.monotonic_ns()}"}
    async with http.post(url, json=body) as response:
        return read_stream(await response.read())
