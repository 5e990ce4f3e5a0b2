"""What the live judge of flow control is made of."""

from pathlib import Path

import aiohttp
import pytest
from aiohttp import web
from benchmarks.flow_stack import LLMD, capacity, llmd_program
from benchmarks.flow_torch import TorchEngines

from tandem_contract import metrics as names
from tandem_contract.config import DisaggregatedServing, FlowControl
from tandem_contract.documents import parse_documents
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_local.ports import free_port

from ..llmd.programs import FOLDER, endpoint_picker_config


def test_twice_as_many_engines_compute_twice_as_much() -> None:
    assert capacity(4) == pytest.approx(2 * capacity(2))


def test_the_program_of_llm_d_is_that_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    assert llmd_program() is None
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert llmd_program() is None
    program = tmp_path / "epp"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    assert llmd_program() == program


def test_llm_ds_configuration_turns_its_flow_control_on() -> None:
    config = endpoint_picker_config(Path("endpoints.yaml"), LLMD)
    plugins = {each["type"] for each in config["plugins"]}
    flow = config["flowControl"]
    named = {flow["saturationDetector"]["pluginRef"]}
    named |= {flow["defaultPriorityBand"]["fairnessPolicyRef"]}
    named |= {each["pluginRef"] for each in config["schedulingProfiles"][0]["plugins"]}
    assert named <= plugins
    # Tandem's EPP reads the same, but for where its backends come from.
    config["plugins"] = [each for each in config["plugins"] if each["type"] != "file-discovery"]
    del config["dataLayer"]
    document = parse_documents("{}", "epp.yaml")[0]
    scheduling = load_scheduling(document, config, DisaggregatedServing(), flow=FlowControl())
    assert scheduling.flow is not None
    assert scheduling.flow.default.ttl == 15.0


async def test_figures_of_torch_engines_are_those_since_the_last_call() -> None:
    computed = 0

    async def page(_request: web.Request) -> web.Response:
        lines = f'{names.ENGINE_PROMPT_TOKENS}{{model_name="m"}} {computed}\n'
        return web.Response(text=f"{lines}{names.ENGINE_GENERATION_TOKENS} {computed / 2}\n")

    app, port = web.Application(), free_port("127.0.0.1")
    app.router.add_get("/metrics", page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    engines = TorchEngines([port])
    async with aiohttp.ClientSession() as http:
        assert [each["tokens"] for each in await engines.read(http)] == [0]
        computed = 100
        assert [each["tokens"] for each in await engines.read(http)] == [150]
        assert [each["tokens"] for each in await engines.read(http)] == [0]
    await runner.cleanup()
