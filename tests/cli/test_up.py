import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tandem_local.addresses import is_free
from tandem_local.ports import free_port

from ..local.pods import group_is_gone, until

pytestmark = pytest.mark.component

FAKE = Path(__file__).with_name("fake_engine.py")
POOLS = """\
apiVersion: tandem.dev/v1alpha1
kind: PrefillPool
metadata: {{name: p}}
spec:
  model: {{name: m, source: {{path: {model}}}}}
  engine: {{type: torch}}
  template: {{spec: {{containers: [{{name: engine, command: {prefill}, args: []}}]}}}}
---
apiVersion: tandem.dev/v1alpha1
kind: DecodePool
metadata: {{name: d}}
spec:
  prefillRef: {{name: p}}
  template: {{spec: {{containers: [{{name: engine, command: {decode}, args: []}}]}}}}
"""


def engine(port: int) -> str:
    return json.dumps(["python", str(FAKE), "$(POD_IP)", str(port)])


def pools(tmp_path: Path, decode: str) -> Path:
    (tmp_path / "model").mkdir()
    file = tmp_path / "pools.yaml"
    text = POOLS.format(model=tmp_path / "model", prefill=engine(8000), decode=decode)
    file.write_text(text)
    return file


async def start(tmp_path: Path, file: Path, port: int) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli", "up", "-f", str(file)),
        *("--port", str(port), "--run-dir", str(tmp_path / "run")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


@pytest.fixture
async def processes() -> AsyncIterator[list[asyncio.subprocess.Process]]:
    started: list[asyncio.subprocess.Process] = []
    yield started
    for process in started:
        if process.returncode is None:
            process.kill()
        await process.communicate()


def groups(tmp_path: Path) -> list[int]:
    try:
        state = json.loads((tmp_path / "run/state.json").read_bytes())
    except FileNotFoundError:
        return []
    return [pid for pod in state["pods"] for pid in pod["pids"].values()]


async def test_ctrl_c_stops_the_stack_and_leaves_no_process(
    tmp_path: Path, processes: list[asyncio.subprocess.Process]
) -> None:
    port = free_port("127.0.0.1")
    up = await start(tmp_path, pools(tmp_path, engine(8200)), port)
    processes.append(up)
    assert up.stdout is not None
    lines = []
    while not (lines and lines[-1].startswith("Serving at")):
        lines.append((await up.stdout.readline()).decode())
        assert lines[-1], "".join(lines)
    url = f"http://127.0.0.1:{port}/v1/models"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        assert (await answer.json(content_type=None))["data"][0]["id"] == "m"
    # prefill engine, decode engine and sidecar, EPP, Envoy
    running = groups(tmp_path)
    assert len(running) == 5
    up.send_signal(signal.SIGINT)
    output = (await up.stdout.read()).decode()
    assert (await up.wait(), output) == (0, "Stopped.\n")
    # The kernel may take a moment for those that were killed.
    await until(lambda: all(group_is_gone(group) for group in running))
    assert is_free("127.0.0.1", port)
    assert not (tmp_path / "run/state.json").exists()


async def line_of(up: asyncio.subprocess.Process, *starts: str) -> str:
    """The next line that begins with one of `starts`."""
    assert up.stdout is not None
    lines = [""]
    while not lines[-1].startswith(starts):
        lines.append((await up.stdout.readline()).decode())
        assert lines[-1], "".join(lines)
    return lines[-1]


async def test_routing_and_sidecar_settings_apply_while_the_stack_runs(
    tmp_path: Path, processes: list[asyncio.subprocess.Process]
) -> None:
    file = pools(tmp_path, engine(8200))
    up = await start(tmp_path, file, free_port("127.0.0.1"))
    processes.append(up)
    await line_of(up, "Serving at")
    running = groups(tmp_path)
    on = file.read_text()
    for split, enabled in (("off", False), ("auto", True)):
        file.write_text(f"{on}  routing: {{split: {json.dumps(split)}}}\n")
        await line_of(up, "Applied the settings")
        config = json.loads((tmp_path / "run/router.yaml").read_bytes())
        assert config["disaggregated_serving"]["enabled"] is enabled
        assert len(config["backends"]) == 2
    file.write_text(f"{on}  sidecar: {{retries: 5}}\n")
    await line_of(up, "Applied the settings")
    (log,) = (tmp_path / "run").glob("pods/*/sidecar.log")
    await until(lambda: "settings reloaded: --retries 2 -> 5" in log.read_text())
    file.write_text(f"{on}  replicas: 2\n")
    await line_of(up, "The changed pools need other pods")
    file.write_text(f"{on}  replicas: many\n")
    assert "pools.yaml:" in await line_of(up, "The changed pools are not used")
    used = (tmp_path / "run/router.yaml").read_bytes()
    file.write_text(f"{on}  routing: {{epp: {{config: {{plugins: [{{type: no-such}}]}}}}}}\n")
    assert "unknown plugin 'no-such'" in await line_of(up, "The changed pools are not used")
    assert (tmp_path / "run/router.yaml").read_bytes() == used
    assert groups(tmp_path) == running, "no process was started or stopped"


async def test_sigterm_during_start_leaves_no_process(
    tmp_path: Path, processes: list[asyncio.subprocess.Process]
) -> None:
    file = pools(tmp_path, json.dumps(["sleep", "600"]))
    up = await start(tmp_path, file, free_port("127.0.0.1"))
    processes.append(up)
    await until(lambda: len(groups(tmp_path)) == 5)
    running = groups(tmp_path)
    up.send_signal(signal.SIGTERM)
    assert await up.wait() == 0
    await until(lambda: all(group_is_gone(group) for group in running))


async def test_an_engine_that_exits_fails_the_start_with_the_end_of_its_log(
    tmp_path: Path, processes: list[asyncio.subprocess.Process]
) -> None:
    file = pools(tmp_path, json.dumps(["sh", "-c", "echo no such weights; exit 4"]))
    up = await start(tmp_path, file, free_port("127.0.0.1"))
    processes.append(up)
    out = (await up.communicate())[0].decode()
    assert up.returncode == 1
    assert "/engine: exited with code 4; its log, " in out
    assert out.endswith(":\n  | no such weights\n")
    assert not (tmp_path / "run/state.json").exists()


async def test_a_port_in_use_is_reported_before_anything_starts(
    tmp_path: Path, processes: list[asyncio.subprocess.Process]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        up = await start(tmp_path, pools(tmp_path, engine(8200)), port)
        processes.append(up)
        out = (await up.communicate())[0].decode()
    assert up.returncode == 2
    assert out == f"error: port {port} of 127.0.0.1 is in use: choose another with --port\n"
    assert not (tmp_path / "run").exists()
