"""The conventions of every command: precedence, one line per error, exit 2."""

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from tandem_contract.commandline import (
    DURATION,
    HOST_PORT,
    HostPort,
    command,
    fail,
    parse_host_port,
)


@command("tandem-thing")
@click.option("--timeout", type=DURATION, default="30s")
@click.option("--retries", type=int, default=2)
@click.option("--listen", type=HOST_PORT, default="0.0.0.0:8000")
@click.option("--fallback/--no-fallback", default=True)
@click.option("--allow", multiple=True)
@click.option("--text", default="")
@click.option("--model", required=True)
@click.pass_context
def thing(ctx: click.Context, **values: Any) -> None:
    ctx.obj.update(values)


def run(*arguments: str, **environ: str) -> tuple[dict[str, Any], Result]:
    values: dict[str, Any] = {}
    return values, CliRunner().invoke(thing, arguments, env=environ, obj=values)


def given(*arguments: str, **environ: str) -> dict[str, Any]:
    values, result = run(*arguments, **environ)
    assert result.exit_code == 0, result.output
    return values


def refused(*arguments: str, **environ: str) -> str:
    values, result = run(*arguments, **environ)
    assert result.exit_code == 2, result.output
    assert values == {}
    (line,) = (line for line in result.stderr.splitlines() if line.startswith("Error: "))
    return line.removeprefix("Error: ")


@pytest.fixture
def flags(tmp_path: Path) -> Path:
    return tmp_path / "flags.yaml"


def test_defaults() -> None:
    assert given("--model", "m") == {
        "timeout": 30.0, "retries": 2, "listen": HostPort("0.0.0.0", 8000), "fallback": True,
        "allow": (), "text": "", "model": "m",
    }  # fmt: skip


def test_a_file_gives_every_kind_of_flag(flags: Path) -> None:
    flags.write_text(
        "model: 7\ntimeout: 250ms\nretries: 0\nlisten: '[::1]:80'\nfallback: false\n"
        "allow: [a, 10.0.0.0/8]\ntext: {kv_role: kv_both, ports: [1, 2]}\n"
    )
    assert given("--config", str(flags)) == {
        "timeout": 0.25, "retries": 0, "listen": HostPort("::1", 80), "fallback": False,
        "allow": ("a", "10.0.0.0/8"), "text": '{"kv_role":"kv_both","ports":[1,2]}', "model": "7",
    }  # fmt: skip


def test_a_flag_wins_over_the_environment_over_the_file_over_the_default(flags: Path) -> None:
    flags.write_text("model: m\nretries: 5\n")
    flag, file = ("--retries", "7"), ("--config", str(flags))
    environ = {"TANDEM_THING_RETRIES": "6"}
    assert given(*file, *flag, **environ)["retries"] == 7
    assert given(*file, **environ)["retries"] == 6
    assert given(*file)["retries"] == 5
    assert given("--model", "m")["retries"] == 2


def test_the_file_itself_may_come_from_the_environment(flags: Path) -> None:
    flags.write_text("model: m\n")
    assert given(TANDEM_THING_CONFIG=str(flags))["model"] == "m"


def test_an_empty_list_gives_no_values(flags: Path) -> None:
    flags.write_text("model: m\nallow: []\n")
    assert given("--config", str(flags))["allow"] == ()


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("model: m\nmodle: x", 2, "modle: no such flag: see --help"),
        ("config: x", 1, "config: no such flag"),
        ("version: true", 1, "version: no such flag"),
        ("no-fallback: true", 1, "no-fallback: no such flag"),
        ("1: x", 1, "no such flag"),
        ("\ntimeout: 30", 2, "timeout: '30' is not a duration"),
        ("timeout: 1.5", 1, "timeout: '1.5' is not a duration"),
        ("retries: many", 1, "retries: 'many' is not a valid integer"),
        ("retries: [1]", 1, "retries: expected one value, this is a list"),
        ("allow: a", 1, "allow: expected a list"),
        ("listen: 8000", 1, "listen: '8000' is not HOST:PORT"),
        ("fallback: maybe", 1, "fallback: 'maybe' is not a valid boolean"),
        ("model:", 1, "model: has no value"),
        ("model: [", 1, "not YAML"),
        ("- model", 1, "expected one YAML mapping of flag names to values"),
        ("", 1, "expected one YAML mapping"),
    ],
)
def test_a_bad_file_is_one_line_with_its_place(
    flags: Path, text: str, line: int, says: str
) -> None:
    flags.write_text(text)
    message = refused("--config", str(flags))
    assert message.startswith(f"{flags}:{line}: ")
    assert says in message


def test_a_file_that_is_not_there_says_so(flags: Path) -> None:
    assert refused("--config", str(flags)) == (
        f"{flags}: cannot read it: No such file or directory"
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "Missing option '--model'"),
        (("--model", "m", "--nonsense"), "No such option '--nonsense'"),
        (("--model", "m", "--timeout", "30"), "'--timeout': '30' is not a duration"),
        (("--model", "m", "--timeout", "-3s"), "'--timeout': '-3s' is not a duration"),
        (("--model", "m", "--listen", "8000"), "'--listen': '8000' is not HOST:PORT"),
        (("--model", "m", "--retries", "x"), "'--retries': 'x' is not a valid integer"),
        (("--model", "m", "extra"), "unexpected extra argument"),
    ],
)
def test_a_usage_error_is_one_line_and_exits_with_2(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(*arguments)


def test_a_bad_environment_variable_is_a_usage_error() -> None:
    assert "is not a duration" in refused("--model", "m", TANDEM_THING_TIMEOUT="x")


def test_version_and_help() -> None:
    _, version = run("--version")
    assert version.exit_code == 0
    assert version.output.startswith("tandem-thing, version ")
    _, text = run("-h")
    assert text.exit_code == 0
    assert "[default: 30s]" in text.output
    assert "--config FILE" in text.output


def test_a_command_may_keep_config_for_itself() -> None:
    @command("tandem-own", flags_file=False)
    @click.option("--config")
    def own(config: str) -> None:
        click.echo(config)

    result = CliRunner().invoke(own, ["--config", "mine"])
    assert result.output == "mine\n"


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("a:80", HostPort("a", 80)),
        ("10.0.0.1:0", HostPort("10.0.0.1", 0)),
        ("[::1]:65535", HostPort("::1", 65535)),
        ("[10.0.0.1]:80", HostPort("10.0.0.1", 80)),
        ("[0:0::1]:1", HostPort("::1", 1)),
    ],
)
def test_an_address_is_read(text: str, address: HostPort) -> None:
    assert parse_host_port(text) == address
    assert parse_host_port(str(address)) == address


@pytest.mark.parametrize(
    "text",
    ["", "a", ":80", "a:", "a:x", "a:-1", "a:65536", "a: 80", " a:80", "::1:80", "[::1]80",
     "[::1:80", "[a]:80", "http://a:80", "a/b:80", "a:\u0663"],
)  # fmt: skip
def test_an_invalid_address_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|'a'"):
        parse_host_port(text)


@pytest.mark.parametrize("status", [1, 2])
def test_failing_is_one_line_on_stderr(status: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        fail("port 8000 is in use", status=status)
    assert caught.value.code == status
    assert capsys.readouterr() == ("", "error: port 8000 is in use\n")
