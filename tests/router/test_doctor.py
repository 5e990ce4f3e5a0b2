"""`tandem doctor --router`: what it finds at the backends of a router."""

import asyncio
import json
import os

from click.testing import CliRunner, Result

from tandem_cli.doctor import doctor
from tandem_router.configuration import load

from ..sidecar.peers import Script, Turn
from .conftest import Harness


def tells(model: str, block_size: int) -> tuple[Script, Script]:
    """Scripts of an engine's models and of its metrics."""

    async def models(turn: Turn) -> None:
        turn.answer(200, json.dumps({"data": [{"id": model, "max_model_len": 4096}]}).encode())

    async def metrics(turn: Turn) -> None:
        page = (
            "# TYPE vllm:cache_config_info gauge\n"
            f'vllm:cache_config_info{{block_size="{block_size}"}} 1\n'
        )
        turn.answer(200, page.encode())

    return models, metrics


async def start(harness: Harness, block_size: int, decode_block_size: int) -> None:
    models, metrics = tells("llama", block_size)
    prefill = await harness.prefill("p")
    prefill.models, prefill.metrics = models, metrics
    models, metrics = tells("llama", decode_block_size)
    decode = await harness.decode("d")
    decode.models, decode.metrics = models, metrics
    await harness.start()


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, doctor, list(arguments))


async def test_backends_that_fit_together_have_no_problem(harness: Harness) -> None:
    await start(harness, 16, 16)
    result = await run("--router", harness.admin(""), "--json")
    findings = json.loads(result.output)["findings"]
    assert result.exit_code == 0, findings
    passed = {(f["check"], f["subject"]) for f in findings if f["severity"] == "ok"}
    assert {("reachable", "p"), ("reachable", "d"), ("compatible", "p → d")} <= passed


async def test_backends_that_differ_and_one_that_is_gone_are_named(harness: Harness) -> None:
    await start(harness, 16, 64)
    (await harness.unified("gone")).close_port()
    harness.write()
    harness.router.components.apply(load(harness.file, os.environ))
    result = await run("--router", harness.admin(""))
    assert result.exit_code == 1
    assert "compatible: p → d: blockSize: prefill has 16, decode has 64" in result.output
    assert "reachable: gone: " in result.output


async def test_an_address_that_is_no_router_is_one_line(harness: Harness) -> None:
    await start(harness, 16, 16)
    engine = harness.backends[0]["url"]
    result = await run("--router", engine)
    assert result.exit_code == 1
    assert f"the router at {engine} does not answer on its admin port" in result.output
    both = await run("--router", engine, "-n", "x")
    assert (both.exit_code, "--router names another target" in both.output) == (2, True)
