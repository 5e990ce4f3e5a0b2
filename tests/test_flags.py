"""Every flag of every command is read: by a setting of its name, as an argument, or by its key."""

import ast
import inspect
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import click
import pytest

from tandem_cli.main import main as tandem
from tandem_engine.main import main as engine
from tandem_epp.main import main as epp
from tandem_operator.main import main as operator
from tandem_router.main import main as router
from tandem_sidecar.main import main as sidecar


def _commands() -> Iterator[click.Command]:
    yield from (engine, epp, operator, router, sidecar)
    assert isinstance(tandem, click.Group)
    context = click.Context(tandem)
    for name in tandem.list_commands(context):
        command = tandem.get_command(context, name)
        assert command is not None
        yield command


def _readers(module: ModuleType) -> Iterator[ModuleType]:
    """`module` and those of Tandem's that it imports names of."""
    yield module
    names = {getattr(value, "__module__", "") for value in vars(module).values()}
    yield from (sys.modules[name] for name in sorted(names) if name.startswith("tandem_"))


def _names_read(module: ModuleType) -> Iterator[str]:
    """Flags that the module reads: as keys, by `pop`, `settings_of` and `Kind(**flags)`."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Subscript(slice=ast.Constant(str(name)), ctx=ast.Load()):
                yield name
            case ast.Call(func=ast.Attribute(attr="pop"), args=[ast.Constant(str(name)), *_]):
                yield name
            case ast.Call(func=ast.Name("settings_of"), args=[ast.Name(kind), *_]):
                yield from inspect.signature(getattr(module, kind)).parameters
            case ast.Call(func=ast.Name(kind), keywords=[ast.keyword(arg=None)]):
                if isinstance(called := vars(module).get(kind), type):
                    yield from inspect.signature(called).parameters


def unread(command: click.Command) -> set[str]:
    """Flags that nobody reads. Those of llm-d are rows of a table that has its own tests, and the
    router passes those of the sidecar on to it."""
    function = inspect.unwrap(command.callback) if command.callback else None
    assert function is not None
    flags = {
        flag.name
        for flag in command.params
        if flag.expose_value and flag.name and not flag.name.startswith("llmd_")
        if command is not router or flag not in sidecar.params
    }
    read = set(inspect.signature(function).parameters)
    for module in _readers(import_module(function.__module__)):
        read.update(_names_read(module))
    return flags - read


@pytest.mark.parametrize("command", tuple(_commands()), ids=lambda command: str(command.name))
def test_every_flag_is_read(command: click.Command) -> None:
    assert unread(command) == set()


def test_a_flag_that_nobody_reads_is_found() -> None:
    name = "flag_of_this_test"
    flag = click.Option([f"--{name.replace('_', '-')}"])
    changed = click.Command("tandem-epp", params=[*epp.params, flag], callback=epp.callback)
    assert unread(changed) == {name}
