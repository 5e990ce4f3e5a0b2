"""Streams survive their engine behind sidecars without the flag, once the EPP's file says so."""

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract.request_kinds import PATHS, RequestKind

from ...epp.real import Epp, envoy, envoy_settings, epp, until
from ..processes import Sidecar, sidecar
from ..resume.scripted import events
from .engine import SERVED, Engine
from .test_resume import ASKED, BODIES, text_of

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

KIND = RequestKind.COMPLETIONS
BODY: dict[str, Any] = {"model": SERVED, **BODIES[KIND], **ASKED}


def configuration(pods: dict[str, Sidecar], **sections: Any) -> str:
    backends = [
        {"name": name, "role": "decode", "url": f"http://{pod.listen}"}
        for name, pod in pods.items()
    ]
    return json.dumps({"backends": backends, **sections})


async def test_a_reloaded_file_turns_it_on_for_running_sidecars(
    decode: Engine, unified: Engine, tmp_path: Path
) -> None:
    keys, config = tmp_path / "keys", tmp_path / "router.yaml"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    engines = {"decode-0": decode, "decode-1": unified}
    async with AsyncExitStack() as stack:
        pods = {}
        for name, engine in engines.items():
            flags = ("--engine", engine.url, "--plan-key-dir", str(keys), "--pod-name", name)
            pods[name] = await stack.enter_async_context(sidecar(*flags))
        config.write_text(configuration({"decode-0": pods["decode-0"]}))
        picker = await stack.enter_async_context(epp(config, "--plan-key-dir", str(keys)))
        url = await stack.enter_async_context(envoy(tmp_path, envoy_settings(picker.grpc)))
        timeout = aiohttp.ClientTimeout(total=120)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))
        async with http.post(url + PATHS[KIND], json=BODY) as response:
            unbroken = events(await response.read())
        config.write_text(configuration(pods, resume={"enabled": True}))
        await until(lambda: picker.serves(*pods))
        async with http.post(url + PATHS[KIND], json=BODY) as response:
            begin = await response.content.readuntil(b"\n\n")
            engines[await serving(picker)].kill()
            resumed = events(begin + await response.read())
        assert text_of(resumed) == text_of(unbroken)
        usages = [stream[-1]["usage"]["completion_tokens"] for stream in (unbroken, resumed)]
        assert usages == [ASKED["max_tokens"]] * 2


async def serving(picker: Epp) -> str:
    """The backend that serves the only request."""
    figures = await picker.figures()
    (line,) = [k for k, v in figures.items() if k.startswith("tandem_epp_in_flight{") and v]
    return line.partition('backend="')[2].partition('"')[0]
