"""docs/security.md: the table of ports has every port and every flag that opens one."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tandem_cli.main import main as tandem
from tandem_contract import ports
from tandem_contract.commandline import HOST_PORT
from tandem_engine.main import main as engine
from tandem_epp.main import main as epp
from tandem_operator.main import main as operator
from tandem_router.main import main as router
from tandem_sidecar.main import main as sidecar

PAGE = Path(__file__).parent.parent / "docs/security.md"
COMMANDS = {
    "tandem": tandem,
    "tandem-engine": engine,
    "tandem-epp": epp,
    "tandem-operator": operator,
    "tandem-router": router,
    "tandem-sidecar": sidecar,
}
OF_OTHERS = {"tandem-epp --peers"}
"""Flags with addresses that the process connects to."""
ROW = re.compile(r"^\| (\d+) \| ([^|]*) \|")


def rows() -> list[tuple[int, str]]:
    """Port and component of each row."""
    matches = (ROW.match(line) for line in PAGE.read_text().splitlines())
    return [(int(match[1]), match[2]) for match in matches if match]


@pytest.mark.parametrize("name", [name for name in vars(ports) if name.isupper()])
def test_every_port_is_in_the_table(name: str) -> None:
    if name != "LAST":
        assert getattr(ports, name) in {port for port, _ in rows()}


def listening(name: str, command: click.Command) -> Iterator[tuple[str, int]]:
    """Flags with an address to listen on, with the command's name, and their default port."""
    for parameter in command.params:
        flag = f"{name} {parameter.opts[0]}"
        if parameter.type is HOST_PORT and flag not in OF_OTHERS:
            yield flag, int(str(parameter.default).rpartition(":")[2])
    if isinstance(command, click.Group):
        context = click.Context(command)
        for child in command.list_commands(context):
            inner = command.get_command(context, child)
            assert inner is not None
            yield from listening(f"{name} {child}", inner)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_flag_that_opens_a_port_is_in_the_table(name: str) -> None:
    shown = {(flag, port) for port, text in rows() for flag in re.findall(r"`([^`]*)`", text)}
    opened = set(listening(name, COMMANDS[name]))
    if name == "tandem-engine":
        opened = {("tandem-engine --port", ports.ENGINE_PREFILL)}
    assert opened <= shown
