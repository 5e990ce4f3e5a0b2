"""A pod of a real API server drains: its stream goes on at another one, with its engine's KV."""

from typing import Any, Final

import aiohttp
import pytest

from tandem_contract.metrics import PromptSource
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_router.configuration import LEAST_IN_FLIGHT

from ...epp.real import until
from ...sidecar.real.engine import SERVED, Engine
from ...sidecar.real.test_resume import BLOCK, sources
from ..cluster import Cluster
from .same_stream import as_chat, check_same, read_stream, stream

pytestmark = [pytest.mark.component, pytest.mark.control_plane, pytest.mark.timeout(300)]

DECODES: Final = ("decode-0", "decode-1")
PREFILL: Final = "prefill-0"
TOKENS: Final = 1000
"""Of an answer that runs on while its pod drains."""


@pytest.mark.parametrize("kind", [RequestKind.COMPLETIONS, RequestKind.CHAT])
async def test_the_next_engine_reads_the_kv_of_the_one_that_drains(
    cluster: Cluster, shared: dict[str, Engine], kind: RequestKind
) -> None:
    """Neither computes more than the last block once more, and the prefill pod nothing."""
    engines = {name: shared[name] for name in (*DECODES, PREFILL)}
    for name, engine in engines.items():
        await engine.up()
        if name == PREFILL:
            await cluster.add_prefill(name, engine.address, SERVED)
        else:
            await cluster.add_decode(name, engine.url, SERVED)
    body: dict[str, Any] = {
        "model": SERVED,
        "prompt": f"Seas that no other test asks for, {kind}. " * 8,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = as_chat(body) if kind is RequestKind.CHAT else body
    async with cluster.router(
        *engines,
        resume={"enabled": True},
        disaggregated_serving={"enabled": True},
        **LEAST_IN_FLIGHT,
    ) as process:
        async with cluster.http.post(process.url(PATHS[kind]), json=body) as response:
            begin = b"".join([await response.content.readuntil(b"\n\n") for _ in range(40)])
            pods = await cluster.backends(process)
            # Not asked of the sidecars, which also count the router's checks.
            [first] = [pod["name"] for pod in pods if pod["name"] in DECODES and pod["in_flight"]]
            before = {name: await sources(engine) for name, engine in engines.items()}
            await cluster.pods.draining(first)

            async def has_left() -> bool:
                return await cluster.running(first) == 0

            await until(has_left)
            after = {name: await sources(engine) for name, engine in engines.items()}
            got = read_stream(begin + await response.read())
        moves = 'tandem_sidecar_stream_moves_total{cause="drain",method="continued",result="done"}'
        async with cluster.http.get(process.admin_url("/metrics")) as answer:
            assert f"{moves} 1\n" in (await answer.text()).replace(" 1.0\n", " 1\n")
    async with aiohttp.ClientSession() as http:
        whole = await stream(http, engines[PREFILL].url, body)
    check_same(got, whole, kind)
    moved = {
        name: {each: after[name][each] - before[name][each] for each in PromptSource}
        for name in engines
    }
    [other] = {*DECODES} - {first}
    prompt = whole.counts[0]
    assert moved[PREFILL] == dict.fromkeys(PromptSource, 0)
    assert moved[first][PromptSource.CACHED] > prompt
    assert 0 < moved[first][PromptSource.COMPUTED] <= BLOCK
    assert moved[other][PromptSource.EXTERNAL] > prompt
    assert moved[other][PromptSource.COMPUTED] <= 1
