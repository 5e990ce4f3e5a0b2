"""`python -m tests.bare`: run the tests that start programs, on a machine that has none of them.

With `--all` it runs all tests.
"""

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Set
from pathlib import Path

import pytest

from ..cluster.fixtures import LEFT_OUT
from .recorder import BASE, CACHE_KEY, HIDDEN

_PLACES = ("TANDEM_CLUSTER_CACHE", "KUBEBUILDER_ASSETS", "TANDEM_LLMD_BIN")
"""Variables that say where programs are."""


class OnlyPassedOrLeftOut:
    """Fails the run if a test is skipped without saying what it needs."""

    def __init__(self, users: Set[str] | None) -> None:
        """`users`: the tests to run; None: all."""
        self._users = users
        self._silent: list[str] = []

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        if self._users is not None:
            left = [item for item in items if item.nodeid not in self._users]
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item.nodeid in self._users]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            reason = report.longrepr[2].removeprefix("Skipped: ")
            if not reason.startswith(LEFT_OUT):
                self._silent.append(f"{report.nodeid}: {reason}")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._silent:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for test in self._silent:
            terminalreporter.line(f"SKIPPED WITHOUT {LEFT_OUT.strip()} {test}", red=True)


def hide_programs(folder: Path) -> None:
    """Let this process and its children find no program but the basic ones. `folder`: empty."""
    programs = folder / "bin"
    programs.mkdir()
    for name in BASE:
        if file := shutil.which(name):
            (programs / name).symlink_to(file)
    os.environ["PATH"] = str(programs)
    for variable in _PLACES:
        os.environ.pop(variable, None)
    os.environ[HIDDEN] = "1"
    os.environ["TANDEM_CLUSTER_CACHE"] = str(folder / "cache")


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--all"]
    users = None
    if "--all" not in sys.argv:
        users = known_users()
        # No other file need be imported.
        arguments += sorted({file for test in users if Path(file := test.split("::")[0]).exists()})
    with tempfile.TemporaryDirectory() as folder:
        hide_programs(Path(folder))
        tiers = "not node and not vllm and not chaos"
        return pytest.main(["-m", tiers, *arguments], plugins=[OnlyPassedOrLeftOut(users)])


def known_users() -> Set[str]:
    """The tests that start programs. Exits if there are none."""
    file = Path(".pytest_cache/v", CACHE_KEY)
    users = json.loads(file.read_text()) if file.exists() else []
    if not users:
        sys.exit("No test is known to start programs: run `make test` first.")
    return frozenset(users)


if __name__ == "__main__":
    sys.exit(main())
