"""The command: what it refuses before it starts, and a life from start to SIGTERM."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner

from tandem_contract import environment
from tandem_contract.durations import parse_duration
from tandem_engine.config import EngineConfig
from tandem_engine.main import main
from tandem_engine.settings import Settings, settings_from
from tandem_engine.tiny import make_tiny_model

COMMAND = [sys.executable, "-m", "tandem_engine.main"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    make_tiny_model(directory, layers=2, hidden=64)
    return directory


def _run(*flags: str, **env: str) -> tuple[int, str]:
    """Exit status and stderr."""
    result = CliRunner().invoke(main, flags, env=env)
    assert isinstance(result.exception, SystemExit)
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--no-such-flag"], "No such option"),
        ([], "Missing option '--model'"),
        (["--model", "/nowhere"], "--model /nowhere: no such directory"),
        (["--model", "MODEL", "--block-size", "-1"], "--block-size"),
        (["--model", "MODEL", "--max-model-len", "x"], "--max-model-len"),
        (["--model", "MODEL", "--port", "70000"], "--port"),
        (["--model", "MODEL", "--dtype", "int4"], "--dtype"),
        (["--model", "MODEL", "--kv-transfer-config", "{"], "--kv-transfer-config: "),
        (["--model", "MODEL", "--kv-events-config", "[]"], "--kv-events-config: "),
        (["--model", "MODEL", "--no-enable-prefix-caching"], "always caches"),
        (["--model", "MODEL", "--shutdown-timeout", "30"], "is not a duration"),
        (["--model", "MODEL", "--host", "no.such.host.invalid"], "--host no.such.host.invalid"),
    ],
)
def test_a_flag_that_cannot_be_used(model: Path, flags: list[str], message: str) -> None:
    status, stderr = _run(*(str(model) if flag == "MODEL" else flag for flag in flags))
    assert (status, message in stderr) == (2, True), stderr


def test_flags_default_to_the_settings_classes(model: Path) -> None:
    """No flag but --model: what the settings classes say without arguments."""
    context = main.make_context("tandem-engine", ["--model", str(model)])
    flags = {**context.params, "served_model_name": ("tiny",)}
    engine = EngineConfig(model, "tiny")
    assert settings_from(flags, env={}) == Settings(engine, ("tiny",))
    option = next(o for o in main.params if o.name == "shutdown_timeout")
    assert parse_duration(str(option.default)) == Settings(engine, ("tiny",)).shutdown_timeout


def test_a_side_channel_port_that_is_none(model: Path) -> None:
    transfer = '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'
    status, stderr = _run(
        "--model", str(model), "--kv-transfer-config", transfer,
        **{environment.SIDE_CHANNEL_PORT: "many"},
    )  # fmt: skip
    assert status == 2
    assert f"{environment.SIDE_CHANNEL_PORT}=many: a port is 0 to 65535" in stderr


def test_a_model_directory_that_lacks_a_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    status, stderr = _run("--model", str(tmp_path))
    assert (status, f"{tmp_path}: no tokenizer.json there" in stderr) == (2, True)
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "model.safetensors").write_text("")
    status, stderr = _run("--model", str(tmp_path))
    assert (status, "tokenizer.json: not a tokenizer" in stderr) == (2, True)


def test_a_port_in_use(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        status, stderr = _run("--model", str(model), "--host", "127.0.0.1", "--port", port)
    assert status == 1
    assert stderr.startswith(f"error: cannot listen on 127.0.0.1:{port}: address already in use")


@asynccontextmanager
async def _engine(
    model: Path, *flags: str, env: dict[str, str] | None = None
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A ready engine, and its URL."""
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "--model", str(model), "--served-model-name", "tiny", "--host", "127.0.0.1",
        "--port", "0", "--num-gpu-blocks-override", "64", "--dtype", "float64", *flags,
        env={**ENV, **(env or {})}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stderr is not None
        line = (await process.stderr.readline()).decode()
        assert "ready: http://127.0.0.1:" in line, line + (await process.stderr.read()).decode()
        assert "tiny, 64 KV blocks of 16 tokens" in line
        yield process, line.split("ready: ")[1].split()[0]
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.component
async def test_sigterm_lets_a_running_stream_finish(model: Path) -> None:
    body = {"prompt": "private words", "max_tokens": 200, "ignore_eos": True, "stream": True}
    async with _engine(model) as (process, url), aiohttp.ClientSession(url) as http:
        async with http.post("/v1/completions", json=body) as response:
            await response.content.readline()
            process.send_signal(signal.SIGTERM)
            remaining_events = await response.text()
        assert remaining_events.endswith("data: [DONE]\n\n")
        assert remaining_events.count('"text":') == 199
        _, stderr = await process.communicate()
        assert process.returncode == 0
        assert b"private words" not in stderr


@pytest.mark.component
async def test_a_tiny_model_is_made_and_taken_away(tmp_path: Path) -> None:
    """Two engines of one seed agree, and neither leaves anything."""
    texts = []
    for made_in in (tmp_path / "a", tmp_path / "b"):
        made_in.mkdir()
        # torch makes the directory of its compiler's cache as it is imported.
        directories = {"TMPDIR": made_in, "TORCHINDUCTOR_CACHE_DIR": tmp_path / "inductor"}
        environ = {name: str(path) for name, path in directories.items()}
        async with _engine(Path("tiny:7"), env=environ) as (process, url):
            async with aiohttp.ClientSession(url) as http:
                body = {"prompt": "hello", "max_tokens": 8}
                answer = await (await http.post("/v1/completions", json=body)).json()
                texts.append(answer["choices"][0]["text"])
            process.terminate()
            assert await process.wait() == 0
        assert not list(made_in.iterdir())
    assert texts[0] == texts[1]
