"""A request whose engine takes nothing of it goes to another one: real engines, sidecars, EPP and
Envoy."""

import asyncio
import itertools
import json
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tandem_operator.routing.envoy.http_filters import BodyMode

from ...sidecar.processes import Sidecar, sidecar
from ...sidecar.real.client import ask
from ...sidecar.real.engine import SERVED, engines
from ...sidecar.real.pair import call, expected_tokens
from ..real import envoy, envoy_settings, epp, until

pytestmark = pytest.mark.component
REQUESTS = 12


SCORES = {"plugins": [{"type": "queue-scorer"}]}
"""llm-d's scorers choose, instead of the cost."""


def configuration(sidecars: Iterable[Sidecar], choice: Mapping[str, object]) -> str:
    backends = [
        {"name": f"d{i}", "role": "decode", "url": f"http://{each.listen}", "models": [SERVED]}
        for i, each in enumerate(sidecars)
    ]
    # However slow the test is: only a request can take a dead pod out of choice.
    checks = {"unhealthy_threshold": 1_000_000}
    serving = {"enabled": False}
    return json.dumps({
        "disaggregated_serving": serving, "health_checks": checks, "backends": backends, **choice
    })  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "dies", "choice"),
    [
        *itertools.product(["BUFFERED", "FULL_DUPLEX_STREAMED"], ["engine", "sidecar"], [{}]),
        ("BUFFERED", "engine", SCORES),
    ],
)
async def test_requests_right_after_a_kill_are_served_elsewhere(
    tmp_path: Path, mode: BodyMode, dies: str, choice: Mapping[str, object]
) -> None:
    pair = engines(tmp_path, d0={"role": "kv_both"}, d1={"role": "kv_both"})
    async with AsyncExitStack() as stack:
        for engine in pair:
            engine.begin()
            stack.callback(engine.kill)
        for engine in pair:
            await engine.up()
        keys = tmp_path / "keys"
        keys.mkdir()
        (keys / "20260101T000000Z").write_bytes(b"0123456789abcdef0123456789abcdef")
        flags = ("--plan-key-dir", str(keys))
        sidecars = [
            await stack.enter_async_context(
                sidecar("--engine", engine.url, "--pod-name", f"d{i}", *flags)
            )
            for i, engine in enumerate(pair)
        ]
        config = tmp_path / "router.yaml"
        config.write_text(configuration(sidecars, choice))
        picker = await stack.enter_async_context(epp(config, *flags))
        await until(lambda: picker.serves("d0", "d1"))
        settings = envoy_settings(picker.grpc, [str(each.listen) for each in sidecars], mode)
        url = await stack.enter_async_context(envoy(tmp_path, settings))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        if dies == "engine":
            pair[0].kill()
        else:
            sidecars[0].process.kill()
            await sidecars[0].process.wait()
        requests = [call(seed, stream=seed % 2 == 0) for seed in range(REQUESTS)]
        results = await asyncio.gather(*(ask(http, url, request) for request in requests))
        assert [(each.status, each.error) for each in results] == [(200, "")] * REQUESTS
        assert [each.tokens for each in results] == [expected_tokens(each) for each in requests]
        figures = await picker.figures()
        unreachable = 'tandem_epp_outcomes_total{backend="d0",outcome="unreachable"}'
        assert figures[unreachable] >= 1
        assert await picker.serves("d1")
