import asyncio
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tandem_cli.main import _COMMANDS, _SUMMARIES, main


def test_help_lists_every_command() -> None:
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert all(name in result.output for name in _COMMANDS)
    assert _COMMANDS.keys() == _SUMMARIES.keys()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["statsu"], "No such command 'statsu'. Did you mean 'status'?"),
        (["--nonsense"], "No such option"),
        (["status", "-o", "json", "--watch"], "exclude each other"),
        (["status", "-A", "-n", "x"], "exclude each other"),
        (["status", "--run-dir", ".", "-A"], "--run-dir is for this machine's stack"),
        (["status", "name", "extra"], "unexpected extra argument"),
        (["completion", "tcsh"], "is not one of 'bash', 'zsh', 'fish'"),
        (["up"], "Missing option '-f'"),
        (["render"], "Missing option '-f'"),
        (["up", "-f", "x", "--port", "-1"], "-1 is not in the range"),
        (["up", "-f", "x", "--port", "x"], "is not a valid integer"),
        (["render", "-f", "x", "-o", "toml"], "is not one of 'yaml', 'json'"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(args: list[str], message: str) -> None:
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 2
    assert message in result.output


def test_version() -> None:
    assert CliRunner().invoke(main, ["--version"]).output.startswith("tandem, version ")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_a_script_of_that_shell(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_TANDEM_COMPLETE={shell}_complete" in result.output


@pytest.mark.component
async def test_help_imports_no_subcommand() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from tandem_cli.main import main;"
        "assert CliRunner().invoke(main, ['--help']).exit_code == 0;"
        "heavy = {'torch', 'aiohttp', 'rich', 'tandem_local', 'tandem_operator'};"
        "sys.exit(', '.join(heavy & set(sys.modules)) or 0)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


@pytest.mark.component
@pytest.mark.parametrize("command", ["up", "render"])
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "pools.yaml:1: not YAML"),
        ("kind: Pod\n", "pools.yaml:1"),
        (None, "pools.yaml: cannot read it: No such file"),
    ],
)
def test_invalid_pool_files(tmp_path: Path, command: str, text: str | None, message: str) -> None:
    file = tmp_path / "pools.yaml"
    if text is not None:
        file.write_text(text)
    result = CliRunner().invoke(main, [command, "-f", str(file)])
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.startswith("error: ")


def test_completion_offers_subcommands_by_prefix() -> None:
    ctx = main.make_context("tandem", [], resilient_parsing=True)
    assert [item.value for item in main.shell_complete(ctx, "ti")] == ["tiny-model"]
    assert {item.value for item in main.shell_complete(ctx, "")} == set(_COMMANDS)


@pytest.mark.component
async def test_completion_imports_no_subcommand() -> None:
    code = (
        "import sys; from tandem_cli.main import main;"
        "ctx = main.make_context('tandem', [], resilient_parsing=True);"
        "assert main.shell_complete(ctx, 'ti');"
        "sys.exit('tandem_cli.tiny' in sys.modules)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


@pytest.mark.component
@pytest.mark.parametrize("command", ["demo", "tiny-model"])
async def test_help_does_not_import_torch(command: str) -> None:
    code = (
        "import sys; from click.testing import CliRunner; from tandem_cli.main import main;"
        f"assert CliRunner().invoke(main, ['{command}', '--help']).exit_code == 0;"
        "sys.exit('torch' in sys.modules)"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code)
    assert await process.wait() == 0


@pytest.mark.component
async def test_a_missing_engine_extra_is_named(tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None;"
        f"sys.argv = ['tandem', 'tiny-model', {str(tmp_path / 'model')!r}];"
        "from tandem_cli.main import main; main()"
    )
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stderr=asyncio.subprocess.PIPE
    )
    _, stderr = await process.communicate()
    assert process.returncode == 1
    assert stderr.decode() == "error: this command needs torch: pip install 'tandem-llm[engine]'\n"


def test_a_store_does_not_delete_what_it_was_just_given(tmp_path: Path) -> None:
    arguments = ["store", "--listen", "127.0.0.1:0", "--dir", str(tmp_path), "--max-age", "0s"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code != 0
    assert "--max-age must be above 0" in result.output
