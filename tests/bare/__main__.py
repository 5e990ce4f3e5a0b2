"""`python -m tests.bare`: run the tests that start programs, on a machine that has none of them.

With `--all` it runs all tests.
"""

import os
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from ..cluster.fixtures import LEFT_OUT
from .recorder import BASE, CACHE_KEY, HIDDEN

_PLACES = ("TANDEM_CLUSTER_CACHE", "KUBEBUILDER_ASSETS", "TANDEM_LLMD_BIN")
"""Variables that say where programs are."""


class OnlyPassedOrLeftOut:
    """Fails the run if a test is skipped without saying what it needs."""

    def __init__(self, *, runs_all: bool) -> None:
        self._runs_all = runs_all
        self._tests: list[str] = []
        self._silent: list[str] = []

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        users = set(config.cache.get(CACHE_KEY, []))
        if not self._runs_all:
            left = [item for item in items if item.nodeid not in users]
            config.hook.pytest_deselected(items=left)
            items[:] = [item for item in items if item.nodeid in users]
        self._tests = [item.nodeid for item in items]

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
        if not self._tests:
            terminalreporter.line("No test is known to start programs: run `make test` first.")


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
    with tempfile.TemporaryDirectory() as folder:
        hide_programs(Path(folder))
        arguments = [argument for argument in sys.argv[1:] if argument != "--all"]
        plugin = OnlyPassedOrLeftOut(runs_all=len(arguments) < len(sys.argv) - 1)
        tiers = "not node and not vllm and not chaos"
        return pytest.main(["-m", tiers, *arguments], plugins=[plugin])


if __name__ == "__main__":
    sys.exit(main())
