"""Stored responses behind real Envoys, EPPs and sidecars: each follow-up finds its engine."""

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract.commandline import HostPort
from tandem_contract.plan_keys import PlanKeys
from tandem_operator.routing.envoy.http_filters import BodyMode
from tandem_sidecar.process.run import start
from tandem_sidecar.settings import Settings

from ...sidecar.peers import FakeResponses
from ..real import envoy, envoy_settings, epp
from .test_with_envoy import MODES

pytestmark = pytest.mark.component

LOOPBACK = HostPort("127.0.0.1", 0)
CREATE: dict[str, Any] = {"model": "m", "input": "Hi", "max_output_tokens": 4}


@MODES
@pytest.mark.parametrize("has_keys", [True, False], ids=["plans", "no plans"])
async def test_follow_ups_through_another_epp_that_started_later(
    tmp_path: Path, mode: BodyMode, has_keys: bool
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "k1").write_bytes(b"0123456789abcdef")
    flags = ("--plan-key-dir", str(keys)) if has_keys else ()
    async with AsyncExitStack() as parts:
        engines = [await parts.enter_async_context(FakeResponses()) for _ in range(2)]
        backends = []
        for number, engine in enumerate(engines):
            settings = Settings(
                listen=LOOPBACK, admin=LOOPBACK, engine=engine.address, pod_name=f"d-{number}"
            )
            plan_keys = PlanKeys(keys if has_keys else None)
            sidecar = await parts.enter_async_context(start(settings, plan_keys))
            url = f"http://{sidecar.listen}"
            backends.append({"name": f"d-{number}", "url": url, "role": "decode"})
        config = tmp_path / "router.yaml"
        config.write_text(json.dumps({"backends": backends}))

        async def new_edge(name: str) -> str:
            """The URL of an Envoy with an EPP of its own."""
            picker = await parts.enter_async_context(epp(config, *flags))
            (directory := tmp_path / name).mkdir()
            edge = envoy_settings(picker.grpc, body_mode=mode)
            return await parts.enter_async_context(envoy(directory, edge)) + "/v1/responses"

        client = await parts.enter_async_context(aiohttp.ClientSession())
        first = await new_edge("first")
        ids = []
        for number in range(4):
            body = CREATE | {"input": str(number), "stream": number % 2 == 1}
            async with client.post(first, json=body) as answer:
                text = await answer.text()
            ids += [each for engine in engines for each in engine.stored if each in text]
        assert len(ids) == 4

        for url in (first, await new_edge("second")):
            for response_id in ids:
                body = CREATE | {"previous_response_id": response_id, "store": False}
                async with client.post(url, json=body) as answer:
                    assert answer.status == 200
                    assert (await answer.json())["previous_response_id"] == response_id
                async with client.get(f"{url}/{response_id}") as answer:
                    assert (answer.status, (await answer.json())["id"]) == (200, response_id)
        for response_id in ids:
            async with client.post(f"{first}/{response_id}/cancel") as answer:
                assert await answer.json() == {"cancelled": True}
            async with client.delete(f"{first}/{response_id}") as answer:
                assert answer.status == 200
        assert not any(engine.stored for engine in engines)
        async with client.get(f"{first}/{ids[0]}") as answer:
            assert f"'{ids[0]}' not found" in await answer.text()
