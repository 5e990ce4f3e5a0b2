"""Engines as processes, for the benchmarks."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tandem_local.ports import free_port

ENGINE = Path(sys.executable).with_name("tandem-engine")


@asynccontextmanager
async def engine(
    model: Path, *flags: str, kv_role: str | None = None, threads: int = 1
) -> AsyncIterator[str]:
    """Start a `tandem-engine` on 127.0.0.1, yield its URL, and end it afterwards."""
    port, side_channel = free_port("127.0.0.1"), free_port("127.0.0.1")
    command = [str(ENGINE), "--model", str(model), "--served-model-name", "bench", *flags]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    if kv_role:
        transfer = {
            "kv_connector": "NixlConnector",
            "kv_role": kv_role,
            "kv_load_failure_policy": "fail",
        }
        command += ["--kv-transfer-config", json.dumps(transfer)]
    env = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_channel),
    }
    process = await asyncio.create_subprocess_exec(*command, env=env)
    try:
        await healthy(f"http://127.0.0.1:{port}", process)
        yield f"http://127.0.0.1:{port}"
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def healthy(url: str, process: asyncio.subprocess.Process) -> None:
    """Wait until GET /health answers with 200. Raises RuntimeError when the process exits."""
    async with aiohttp.ClientSession() as session:
        while process.returncode is None:
            try:
                async with session.get(f"{url}/health") as response:
                    if response.status == 200:
                        return
            except aiohttp.ClientConnectionError:
                pass
            await asyncio.sleep(0.05)
    raise RuntimeError(f"the server at {url} exited with {process.returncode}")


async def complete(
    session: aiohttp.ClientSession, url: str, prompt: list[int], tokens: int, **body: object
) -> dict[str, Any]:
    """One greedy completion. Raises RuntimeError with the engine's answer when it fails."""
    request = {
        "model": "bench", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, **body,
    }  # fmt: skip
    async with session.post(f"{url}/v1/completions", json=request) as response:
        answer: dict[str, Any] = await response.json()
        if response.status != 200:
            raise RuntimeError(f"{url}: {response.status} {answer}")
        return answer
