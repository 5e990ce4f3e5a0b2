"""Notes which tests start a program that a machine with Python and make lacks.

The interpreter reports each start of a program to audit hooks, so that it does not matter how a
test starts it. What another process starts is not noticed.
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import pytest

ROOT: Final = Path(__file__).parents[2]
BASE: Final = (
    *(
        "bash",
        "cat",
        "cp",
        "env",
        "kill",
        "ldd",
        "ls",
        "make",
        "mkdir",
        "mkfifo",
        "mount",
        "nsenter",
        "prlimit",
    ),
    *("python3", "rm", "sed", "seq", "setpriv", "sh", "sleep", "sysctl", "tail", "taskset", "true"),
    *("umount", "uname", "unshare"),
)
"""Programs that every Linux with Python and make has, as far as tests use them."""
_STARTERS: Final = frozenset(
    ("bash", "env", "nsenter", "prlimit", "setpriv", "sh", "taskset", "unshare")
)
"""Those of them that start another program, which their arguments name."""
CACHE_KEY: Final = "tandem/tests-that-start-programs"
HIDDEN: Final = "TANDEM_PROGRAMS_HIDDEN"
"""Variable of a run with hidden programs, for its workers."""
_PROPERTY: Final = "programs"

_started: set[str] = set()
"""Programs that the running test has started."""


def programs_beyond_base(command: Sequence[str], path: str | None) -> set[str]:
    """The programs in `command` that a bare machine lacks. `path`: PATH of the new process."""
    words = command[:1]
    if command and Path(command[0]).name in _STARTERS:
        # Which of the words is the program is not known: a word too many costs a test too many in
        # `make bare`, and nothing else.
        words = [part for word in command for part in word.split()]
    files = (Path(file) for word in words if (file := shutil.which(word, path=path)))
    return {str(file) for file in files if not _is_base(file)}


def _is_base(file: Path) -> bool:
    # Environments of this checkout, and scripts that a test has written.
    own = (ROOT, Path(tempfile.gettempdir()))
    if any(file.is_relative_to(folder) for folder in own):
        return True
    return file.name in BASE or file.name.startswith("python3")


def _note(event: str, arguments: tuple[Any, ...]) -> None:
    if event != "subprocess.Popen":
        return
    executable, command, _, environment = arguments
    words = [command] if isinstance(command, str | bytes | os.PathLike) else list(command)
    words[:1] = [executable or words[0]]
    path = environment.get("PATH") if environment else None
    _started.update(programs_beyond_base(list(map(os.fsdecode, words)), path))


class Recorder:
    """The plugin: collects what the hook notes, from all workers."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._users: dict[str, bool] = {}
        """Whether a test started such a program, for all tests that ran."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> object:
        try:
            return (yield)
        finally:
            # It reaches a worker's parent with the report of the teardown.
            item.user_properties.append((_PROPERTY, sorted(_started)))
            _started.clear()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "teardown":
            started = dict(report.user_properties).get(_PROPERTY)
            self._users[report.nodeid] = bool(started)

    def pytest_sessionfinish(self) -> None:
        """Replace what was known of the tests that ran."""
        if not self._config.pluginmanager.has_plugin("cacheprovider"):
            return
        known = set(self._config.cache.get(CACHE_KEY, []))
        known -= self._users.keys()
        known |= {test for test, started in self._users.items() if started}
        self._config.cache.set(CACHE_KEY, sorted(known))


def record(config: pytest.Config) -> None:
    """Note from now on which tests start programs, unless the programs are hidden."""
    if HIDDEN in os.environ:
        return
    sys.addaudithook(_note)
    config.pluginmanager.register(Recorder(config))
