"""`tandem bench` in the hands of the benchmark: its report agrees with what the server did."""

from pathlib import Path

import aiohttp
import msgspec
import pytest
from benchmarks.load_run import ToolFailed, run, server
from benchmarks.load_server import Served
from benchmarks.load_tools import TANDEM, Load, NotInstalled, Tool
from benchmarks.load_truth import truth

from tandem_engine.tiny import make_tiny_model

pytestmark = pytest.mark.component


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory: Path = tmp_path_factory.mktemp("tokenizer") / "model"
    make_tiny_model(directory)
    return directory


async def test_the_report_has_the_losses_that_the_server_caused(tokenizer: Path) -> None:
    arguments = ("--fault", "truncates", "--ttft", "0", "--itl", "0")
    async with server("load_server", *arguments) as url:
        done = await run(TANDEM, Load(url, 20, tokenizer, rate=100))
        async with aiohttp.ClientSession() as session, session.get(f"{url}/served") as response:
            served = msgspec.json.decode(await response.read(), type=list[Served])
    true = truth(served, 20, rate=100)
    assert (true.ok, true.failed) == (16, 4)
    assert (done.reported.ok, done.reported.failed) == (16, 4)
    assert "4 truncated" in done.reported.note
    assert done.usage.cpu > 0


@pytest.mark.parametrize("stream", [False, True])
async def test_the_fake_engine_answers_completely(tokenizer: Path, stream: bool) -> None:
    async with server("fake_engine", "--chunks", "8") as url:
        load = Load(url, 20, tokenizer, clients=4, stream=stream, output_tokens=8)
        done = await run(TANDEM, load)
    assert (done.reported.ok, done.reported.failed) == (20, 0)


async def test_a_tool_without_a_report_fails_with_its_output(tokenizer: Path) -> None:
    tool = Tool(TANDEM.name, TANDEM.program, "", lambda *_: ["no-such-command"], TANDEM.report)
    with pytest.raises(ToolFailed, match=r"tandem bench: no report(.|\n)*No such command"):
        await run(tool, Load("http://127.0.0.1:9", 1, tokenizer))


def test_a_missing_environment_is_named_with_its_command(tmp_path: Path) -> None:
    tool = Tool("a peer", tmp_path / "bin/peer", "make load-peers", TANDEM.arguments, TANDEM.report)
    with pytest.raises(NotInstalled, match="a peer is not installed: make load-peers"):
        tool.find()
