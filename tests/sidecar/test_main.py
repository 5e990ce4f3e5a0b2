"""The command as a process: its lines, its exit statuses, its end."""

import asyncio
import json
import socket
from pathlib import Path

import pytest
from click.testing import CliRunner

from tandem_contract.commandline import HostPort
from tandem_sidecar.main import main

from .peers import FakeDecode, Turn
from .processes import fails, sidecar
from .wire import wire

pytestmark = pytest.mark.component


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
        (("--connector", "lmcache"), "not supported yet"),
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


async def test_a_low_soft_limit_of_open_files_bounds_no_clients() -> None:
    low = ("sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh")
    async with sidecar(under=low) as it:
        limits = Path(f"/proc/{it.process.pid}/limits").read_text()
    [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
    soft, hard = line.split()[3:5]
    assert soft == hard != "256"


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
        sidecar("--engine", f"http://{decode.address}") as it,
    ):
        async with wire(it.listen) as running:
            running.post(b'{"stream": true}')
            await decode.received(1)
            it.process.terminate()
            while await status_of(it.listen) != 503:
                pass  # the signal is on its way
            go.set()
            assert (await running.response()).body == b"data: first\n\ndata: [DONE]\n\n"
        assert await it.ended() == 0
        assert "Traceback" not in await it.rest()


async def test_sigterm_past_the_drain_timeout_ends_with_0() -> None:
    async def script(turn: Turn) -> None:
        turn.stream()
        turn.event("first")
        await turn.gone.wait()

    arguments = ("--drain-timeout", "100ms")
    async with FakeDecode(script) as decode:
        engine = ("--engine", f"http://{decode.address}")
        async with sidecar(*arguments, *engine) as it, wire(it.listen) as client:
            client.post(b'{"stream": true}')
            await client.reader.readuntil(b"first\n\n\r\n")
            it.process.terminate()
            rest = await client.closed()
            assert json.loads(rest.split(b"data: ")[1].split(b"\n")[0])["error"]["code"] == 503
            assert rest.endswith(b"0\r\n\r\n")
            assert await it.ended() == 0


def test_a_config_file_and_the_environment_set_flags(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("workers: 0\n")
    result = CliRunner().invoke(main, ["--config", str(tmp_path / "c.yaml")])
    assert (result.exit_code, "1<=x" in result.stderr) == (2, True)
    result = CliRunner().invoke(main, [], env={"TANDEM_SIDECAR_RETRIES": "many"})
    assert (result.exit_code, "many" in result.stderr) == (2, True)
