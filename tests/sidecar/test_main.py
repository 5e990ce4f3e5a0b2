"""The command as a process: its lines, its exit statuses, its end."""

import asyncio
import json
import re
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from tandem_contract.commandline import HostPort
from tandem_sidecar.main import main

from .peers import FakeDecode, Turn
from .wire import wire

pytestmark = pytest.mark.component
COMMAND = (sys.executable, "-m", "tandem_sidecar.main")
FREE = ("--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0")
READY = re.compile(r"serving on ([\d.]+):(\d+), admin on ([\d.]+):(\d+)")


async def spawn(*arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*COMMAND, *arguments, stdout=pipe, stderr=pipe)


async def fails(*arguments: str) -> tuple[int, str]:
    process = await spawn(*arguments)
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert out == b""
    assert process.returncode is not None
    return process.returncode, err.decode()


@asynccontextmanager
async def sidecar(
    *arguments: str,
) -> AsyncIterator[tuple[asyncio.subprocess.Process, HostPort, HostPort]]:
    process = await spawn(*FREE, *arguments)
    try:
        assert process.stderr is not None
        line = (await asyncio.wait_for(process.stderr.readline(), 30)).decode()
        match = READY.search(line)
        assert match is not None, line
        listen, admin = HostPort(match[1], int(match[2])), HostPort(match[3], int(match[4]))
        yield process, listen, admin
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--nonsense",), "--nonsense"),
        (("--listen", "here"), "HOST:PORT"),
        (("--engine", "ftp://127.0.0.1:1"), "http"),
        (("--tls-cert", __file__), "--tls-key"),
        (("--engine", "127.0.0.1:8200"), "http://HOST:PORT"),
        (("--engine", "http://h:1/path"), "http://HOST:PORT"),
        (("--prefill-allow", "10.0.0.0/99"), "10.0.0.0/99"),
        (("--prefill-timeout", "30"), "30s"),
        (("--prefill-timeout", "-1s"), "-1s"),
        (("--connector", "mooncake"), "not supported yet"),
        (("--connector", "nixel"), "no connector"),
        (("--workers", "0"), "1<=x"),
        (("--retries", "-1"), "-1"),
        (("--max-body", "many"), "KiB"),
        (("--plan-key-dir", "/does/not/exist"), "does not exist"),
    ],
)
def test_usage_errors_end_with_2(arguments: tuple[str, ...], said: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert said in result.stderr


async def test_a_bad_plan_key_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"short")
    status, err = await fails("--plan-key-dir", str(tmp_path))
    assert (status, "at least 16 bytes" in err, "Traceback" in err) == (2, True, False)


async def test_a_port_in_use_is_one_line_and_1() -> None:
    flag = "--admin"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        status, err = await fails("--listen", "127.0.0.1:0", flag, address)
    assert status == 1
    [line] = err.splitlines()
    assert line == f"error: {flag} {address}: cannot listen there: address already in use"


def test_help_and_version() -> None:
    said = CliRunner().invoke(main, ["--help"])
    assert (said.exit_code, "--prefill-timeout" in said.output, "30s" in said.output) == (
        0,
        True,
        True,
    )
    said = CliRunner().invoke(main, ["--version"])
    assert (said.exit_code, "tandem-sidecar" in said.output) == (0, True)


async def status_of(listen: HostPort) -> int:
    async with wire(listen) as client:
        client.post(b"{}", path="/v1/models")
        return (await client.response()).status


async def test_sigterm_drains_and_ends_with_0() -> None:
    go = asyncio.Event()

    async def script(turn: Turn) -> None:
        if turn.request.target != "/v1/completions":
            turn.answer(200, b"{}")
            return
        turn.stream()
        turn.event("first")
        await go.wait()
        turn.event("[DONE]")
        turn.end()

    async with (
        FakeDecode(script) as decode,
        sidecar("--engine", f"http://{decode.address}") as (
            process,
            listen,
            _,
        ),
    ):
        async with wire(listen) as running:
            running.post(b'{"stream": true}')
            await decode.received(1)
            process.terminate()
            while await status_of(listen) != 503:
                pass  # the signal is on its way
            go.set()
            assert (await running.response()).body == b"data: first\n\ndata: [DONE]\n\n"
        assert await asyncio.wait_for(process.wait(), 10) == 0
        assert process.stderr is not None
        assert b"Traceback" not in await process.stderr.read()


async def test_sigterm_past_the_drain_timeout_ends_with_0() -> None:
    async def script(turn: Turn) -> None:
        turn.stream()
        turn.event("first")
        await turn.gone.wait()

    arguments = ("--drain-timeout", "100ms")
    async with FakeDecode(script) as decode:
        engine = ("--engine", f"http://{decode.address}")
        async with sidecar(*arguments, *engine) as (process, listen, _), wire(listen) as client:
            client.post(b'{"stream": true}')
            await client.reader.readuntil(b"first\n\n\r\n")
            process.terminate()
            rest = await client.closed()
            assert json.loads(rest.split(b"data: ")[1].split(b"\n")[0])["error"]["code"] == 503
            assert rest.endswith(b"0\r\n\r\n")
            assert await asyncio.wait_for(process.wait(), 10) == 0


def test_a_config_file_and_the_environment_set_flags(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("workers: 0\n")
    result = CliRunner().invoke(main, ["--config", str(tmp_path / "c.yaml")])
    assert (result.exit_code, "1<=x" in result.stderr) == (2, True)
    result = CliRunner().invoke(main, [], env={"TANDEM_SIDECAR_RETRIES": "many"})
    assert (result.exit_code, "many" in result.stderr) == (2, True)
