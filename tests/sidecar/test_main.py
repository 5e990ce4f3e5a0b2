"""The command: its flags and their defaults; as a process, its exit statuses and its end."""

import asyncio
import json
import re
import socket
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from tandem_contract.commandline import HostPort
from tandem_contract.durations import parse_duration
from tandem_sidecar.main import main, settings_from
from tandem_sidecar.settings import Settings

from .peers import FakeDecode, Turn
from .processes import fails, sidecar
from .wire import wire

component = pytest.mark.component
CRD = Path(__file__).parents[2] / "crds" / "decodepools.yaml"


@pytest.mark.parametrize(
    ("arguments", "message"),
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
        (("--connector", "p2p-nccl"), "not supported yet"),
        (("--connector", "nixel"), "no connector"),
        (("--workers", "0"), "1<=x"),
        (("--retries", "-1"), "-1"),
        (("--max-body", "many"), "KiB"),
        (("--plan-key-dir", "/does/not/exist"), "does not exist"),
    ],
)
def test_usage_errors_exit_with_2(arguments: tuple[str, ...], message: str) -> None:
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert message in result.stderr


@component
async def test_a_bad_plan_key_is_a_usage_error(tmp_path: Path) -> None:
    (tmp_path / "k").write_bytes(b"short")
    status, err = await fails("--plan-key-dir", str(tmp_path))
    assert (status, "at least 16 bytes" in err, "Traceback" in err) == (2, True, False)


@component
async def test_a_port_in_use_is_reported_in_one_line_and_exits_with_1() -> None:
    flag = "--admin"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        status, err = await fails("--listen", "127.0.0.1:0", flag, address)
    assert status == 1
    [line] = err.splitlines()
    assert line == f"error: {flag} {address}: cannot listen there: address already in use"


@component
async def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one() -> None:
    low = ("sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh")
    async with sidecar(under=low) as server:
        limits = Path(f"/proc/{server.process.pid}/limits").read_text()
    [line] = [line for line in limits.splitlines() if line.startswith("Max open files")]
    soft, hard = line.split()[3:5]
    assert soft == hard != "256"


def test_help_and_version() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert (result.exit_code, "--prefill-timeout" in result.output, "30s" in result.output) == (
        0,
        True,
        True,
    )
    result = CliRunner().invoke(main, ["--version"])
    assert (result.exit_code, "tandem-sidecar" in result.output) == (0, True)


def test_the_flags_defaults_are_those_of_the_settings() -> None:
    context = main.make_context("tandem-sidecar", [])
    assert settings_from(context.params) == Settings()


def test_the_flags_defaults_are_those_of_the_crd() -> None:
    """A pool without `spec.sidecar` gets from the CRD what the command would use by itself."""
    [version] = yaml.safe_load(CRD.read_text())["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    sidecar, drain = spec["sidecar"]["properties"], spec["drain"]["properties"]
    in_crd = {name: field["default"] for name, field in sidecar.items() if "default" in field}
    in_crd["drainTimeout"] = drain["timeout"]["default"]
    flags = main.make_context("tandem-sidecar", []).params
    assert set(in_crd) >= {"prefillTimeout", "kvTransferTimeout", "fallbackToUnified", "retries"}
    for name, default in in_crd.items():
        flag = re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", name)
        in_seconds = parse_duration(default) if isinstance(default, str) else default
        assert flags[flag] == in_seconds, name


@pytest.mark.parametrize(
    ("flag", "default"),
    [("prefill-timeout", "30s"), ("drain-timeout", "120s"), ("push-timeout", "5m"),
     ("max-body", "32MiB"), ("engine", "http://127.0.0.1:8200")],
)  # fmt: skip
def test_help_shows_defaults_with_units(flag: str, default: str) -> None:
    shown = CliRunner().invoke(main, ["--help"], terminal_width=200).output
    [after] = re.findall(rf"--{flag} .*?\[default:\s+([^]]+)\]", shown, re.DOTALL)
    assert after == default


@pytest.mark.parametrize(
    ("given", "is_on"),
    [
        ([], False),
        (["--resume"], True),
        (["--resume", "--retries", "1"], True),
        (["--resume", "auto"], True),
        (["--resume=always"], True),
        (["--resume", "never"], False),
    ],
)
def test_streams_are_resumed_by_a_flag_of_three_words(given: list[str], *, is_on: bool) -> None:
    context = main.make_context("tandem-sidecar", given)
    assert settings_from(context.params).resume is is_on


async def status_of(listen: HostPort) -> int:
    async with wire(listen) as client:
        client.post(b"{}", path="/v1/models")
        return (await client.response()).status


@component
async def test_sigterm_drains_and_exits_with_0() -> None:
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
        sidecar("--engine", f"http://{decode.address}") as server,
    ):
        async with wire(server.listen) as running:
            running.post(b'{"stream": true}')
            await decode.received(1)
            server.process.terminate()
            while await status_of(server.listen) != 503:
                pass  # the signal is on its way
            go.set()
            assert (await running.response()).body == b"data: first\n\ndata: [DONE]\n\n"
        assert await server.exit_status() == 0
        assert "Traceback" not in await server.read_log_to_end()


@component
async def test_sigterm_exits_with_0_when_the_drain_times_out() -> None:
    async def script(turn: Turn) -> None:
        turn.stream()
        turn.event("first")
        await turn.gone.wait()

    arguments = ("--drain-timeout", "100ms")
    async with FakeDecode(script) as decode:
        engine = ("--engine", f"http://{decode.address}")
        async with sidecar(*arguments, *engine) as server, wire(server.listen) as client:
            client.post(b'{"stream": true}')
            await client.reader.readuntil(b"first\n\n\r\n")
            server.process.terminate()
            remainder = await client.closed()
            assert json.loads(remainder.split(b"data: ")[1].split(b"\n")[0])["error"]["code"] == 503
            assert remainder.endswith(b"0\r\n\r\n")
            assert await server.exit_status() == 0


def test_a_config_file_and_the_environment_set_flags(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("workers: 0\n")
    result = CliRunner().invoke(main, ["--config", str(tmp_path / "c.yaml")])
    assert (result.exit_code, "1<=x" in result.stderr) == (2, True)
    result = CliRunner().invoke(main, [], env={"TANDEM_SIDECAR_RETRIES": "many"})
    assert (result.exit_code, "many" in result.stderr) == (2, True)
