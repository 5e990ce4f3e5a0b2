"""A stream goes on at its plan's alternate after this pod's engine was killed."""

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tandem_contract import headers, metrics
from tandem_contract.metrics import PromptSource
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import Plan, Target, load_keys, sign
from tandem_contract.request_kinds import PATHS, RequestKind

from ..processes import Sidecar, drain
from ..resume.scripted import events
from .engine import Engine
from .pair import SPLIT, Pair, start_pair

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

TOKENS = 200
BODIES: dict[RequestKind, dict[str, Any]] = {
    RequestKind.COMPLETIONS: {"prompt": "Rivers and lakes. " * 8},
    RequestKind.CHAT: {"messages": [{"role": "user", "content": "Tell me of rivers. " * 8}]},
}
LAKES: dict[RequestKind, dict[str, Any]] = {
    RequestKind.COMPLETIONS: {"prompt": "Lakes that no other test asks for. " * 8},
    RequestKind.CHAT: {"messages": [{"role": "user", "content": "Tell me of such lakes. " * 8}]},
}
"""Whose KV no engine has."""
BLOCK = 16
"""Tokens of a KV block."""

ASKED: dict[str, Any] = {
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
STREAMS = 8


def with_keys(directory: Path) -> tuple[str, ...]:
    """Flags of sidecars that follow the plans of `plan`."""
    (directory / "k1").write_bytes(b"0123456789abcdef")
    return ("--plan-key-dir", str(directory), "--resume")


def plan(
    keys: Path,
    sidecar: Sidecar,
    name: str,
    request_id: str,
    prefills: tuple[Target, ...],
    *alternates: Target,
) -> dict[str, str]:
    """Headers of a request for the pod of this `name`, whose sidecar this is."""
    now = time.time()
    parts = Plan(
        SPLIT if prefills else RoutingPath.UNIFIED,
        "unit",
        Target(name, str(sidecar.listen)),
        prefills,
        request_id=request_id,
        expires=now + 60,
        alternates=alternates,
    )
    return {headers.PLAN: sign(parts, load_keys(keys), now=now), headers.REQUEST_ID: request_id}


@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("path", [RoutingPath.UNIFIED, SPLIT])
async def test_the_client_cannot_tell(
    decode: Engine,
    unified: Engine,
    prefill: Engine,
    tmp_path: Path,
    kind: RequestKind,
    path: RoutingPath,
) -> None:
    flags, body = with_keys(tmp_path), BODIES[kind] | ASKED
    async with (
        start_pair(decode, *flags) as first,
        start_pair(unified, *flags, "--pod-name", "decode-1") as second,
    ):
        prefills = (Target("prefill-0", str(prefill.address)),) if path is SPLIT else ()
        url = second.sidecar.url(PATHS[kind])
        unbroken = plan(tmp_path, second.sidecar, "decode-1", "r-1", prefills)
        async with second.http.post(url, json=body, headers=unbroken) as response:
            expected = events(await response.read())
        alternate = Target("decode-1", str(second.sidecar.listen))
        url = first.sidecar.url(PATHS[kind])
        broken = plan(tmp_path, first.sidecar, "decode-0", "r-2", prefills, alternate)
        async with first.http.post(url, json=body, headers=broken) as response:
            begin = await response.content.readuntil(b"\n\n")
            decode.kill()
            got = events(begin + await response.read())
        assert text_of(got) == text_of(expected)
        assert len({event["id"] for event in got}) == 1
        assert got[-2]["choices"][0]["finish_reason"] == "length"
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert got[-1]["usage"][count] == expected[-1]["usage"][count]
        assert await second.finished_on(path) == 2
        await second.wait_until_idle(unified)


def text_of(stream: list[Any]) -> str:
    choices = [choice for event in stream for choice in event["choices"]]
    return "".join(each["text"] if "text" in each else each["delta"]["content"] for each in choices)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", BODIES)
@pytest.mark.parametrize("path", [RoutingPath.UNIFIED, SPLIT])
async def test_a_drained_engine_may_end_at_once(
    decode: Engine,
    unified: Engine,
    prefill: Engine,
    tmp_path: Path,
    kind: RequestKind,
    path: RoutingPath,
    workers: int,
) -> None:
    """As the kubelet does it: the preStop hook, the engine's end, SIGTERM for the sidecar."""
    flags, body = with_keys(tmp_path), BODIES[kind] | ASKED
    async with (
        start_pair(decode, *flags, "--workers", str(workers)) as first,
        start_pair(unified, *flags, "--pod-name", "decode-1") as second,
    ):
        prefills = (Target("prefill-0", str(prefill.address)),) if path is SPLIT else ()
        alternate, begun = Target("decode-1", str(second.sidecar.listen)), asyncio.Semaphore(0)

        async def ask(pod: Pair, name: str, request_id: str, *alternates: Target) -> list[Any]:
            signed = plan(tmp_path, pod.sidecar, name, request_id, prefills, *alternates)
            async with pod.http.post(
                pod.sidecar.url(PATHS[kind]), json=body, headers=signed
            ) as response:
                begin = await response.content.readuntil(b"\n\n")
                begun.release()
                return events(begin + await response.read())

        expected = await ask(second, "decode-1", "r-0")
        begun = asyncio.Semaphore(0)
        ids = [f"r-{number}" for number in range(1, 1 + STREAMS)]
        asks = [asyncio.create_task(ask(first, "decode-0", id, alternate)) for id in ids]
        for _ in range(STREAMS):
            await begun.acquire()
        await drain(first.sidecar.admin, wait=True)
        decode.kill()
        first.sidecar.process.send_signal(signal.SIGTERM)
        for got in await asyncio.gather(*asks):
            assert text_of(got) == text_of(expected)
            assert got[-1]["usage"]["total_tokens"] == expected[-1]["usage"]["total_tokens"]
        assert await first.sidecar.exit_status() == 0
        await second.wait_until_idle(unified)


@pytest.mark.parametrize("kind", BODIES)
async def test_the_next_engine_reads_the_kv_of_the_one_that_drains(
    decode: Engine, unified: Engine, prefill: Engine, tmp_path: Path, kind: RequestKind
) -> None:
    """Neither computes more than the last block once more, and the prefill pod nothing."""
    flags, body = with_keys(tmp_path), LAKES[kind] | ASKED | {"max_tokens": 1000}
    async with (
        start_pair(decode, *flags) as first,
        start_pair(unified, *flags, "--pod-name", "decode-1") as second,
    ):
        prefills = (Target("prefill-0", str(prefill.address)),)
        alternate = Target("decode-1", str(second.sidecar.listen))
        signed = plan(tmp_path, first.sidecar, "decode-0", "r-1", prefills, alternate)
        engines = {"first": decode, "next": unified, "prefill": prefill}
        async with first.http.post(
            first.sidecar.url(PATHS[kind]), json=body, headers=signed
        ) as response:
            begin = b"".join([await response.content.readuntil(b"\n\n") for _ in range(40)])
            before = {name: await sources(engine) for name, engine in engines.items()}
            await drain(first.sidecar.admin, wait=True)
            after = {name: await sources(engine) for name, engine in engines.items()}
            got = events(begin + await response.read())
        signed = plan(tmp_path, second.sidecar, "decode-1", "r-2", prefills)
        async with second.http.post(
            second.sidecar.url(PATHS[kind]), json=body, headers=signed
        ) as response:
            expected = events(await response.read())
        assert text_of(got) == text_of(expected)
        assert got[-1]["usage"]["total_tokens"] == expected[-1]["usage"]["total_tokens"]
        moved = {
            name: {each: after[name][each] - before[name][each] for each in PromptSource}
            for name in engines
        }
        assert moved["prefill"] == dict.fromkeys(PromptSource, 0)
        prompt = expected[-1]["usage"]["prompt_tokens"]
        assert moved["first"][PromptSource.CACHED] > prompt
        assert 0 < moved["first"][PromptSource.COMPUTED] <= BLOCK
        assert moved["next"][PromptSource.EXTERNAL] > prompt
        assert moved["next"][PromptSource.COMPUTED] <= 1
        assert await first.errors() == await second.errors() == {}
        await second.wait_until_idle(decode, unified, prefill)


async def sources(engine: Engine) -> dict[PromptSource, float]:
    """The tokens of the engine's prompts, by where their KV came from."""
    name = metrics.ENGINE_PROMPT_BY_SOURCE
    return {each: await engine.figure(name, source=each) for each in PromptSource}
