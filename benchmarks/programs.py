"""Programs that benchmarks start and that `make setup` does not install.

A benchmark that needs one defines `missing_programs() -> list[str]`: a line for each program that
this machine lacks, with the command that installs it. `python -m benchmarks` asks every benchmark
before it measures anything.
"""

from collections.abc import Callable, Sequence
from types import ModuleType

from tests.cluster.tools import MissingTool

from tandem_local.errors import SetupError

from . import h2load, load_tools


def missing(finders: Sequence[Callable[[], object]]) -> list[str]:
    """The messages of the finders that do not find their program.

    A finder returns anything, or raises NotInstalled, MissingTool or SetupError; the message names
    the program and the command that installs it.
    """
    messages = []
    for find in finders:
        try:
            find()
        except (h2load.NotInstalled, load_tools.NotInstalled, MissingTool, SetupError) as err:
            messages.append(str(err))
    return messages


def missing_for(benchmarks: Sequence[ModuleType]) -> list[str]:
    """One line `benchmark: message` for each program that one of `benchmarks` lacks."""
    return [
        f"{module.__name__.rpartition('.')[2]}: {message}"
        for module in benchmarks
        for message in getattr(module, "missing_programs", list)()
    ]
