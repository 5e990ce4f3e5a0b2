"""`--cpu`: which files take the processor's time, with all processes that their tests start.

On a machine that others use, too, seconds of the clock say little. A control group counts what each
worker and its processes take: API servers and engines that outlive a test as well, in the test
during which they take it. Needs root.
"""

import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import pytest

_VERSIONS = (
    (Path("/sys/fs/cgroup/cpuacct"), "cpuacct.usage", 1e9),
    (Path("/sys/fs/cgroup"), "cpu.stat", 1e6),
)
"""Of either version of control groups: the folder of groups, the file with the time, its unit."""
_PROPERTY = "cpu"
_SHOWN = 40
"""Files in the summary."""


class ProcessorTime:
    """The plugin: measures in each worker, and shows the sums."""

    def __init__(self) -> None:
        self._folder, self._file, self._unit = next(
            version for version in _VERSIONS if (version[0] / version[1]).exists()
        )
        self._prefix = f"tandem-tests-{os.getpid()}-"
        self._process = 0
        """The process that is in the group: a fork is in that of its parent at first."""
        self._until_now = 0.0

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self) -> object:
        self._join()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> object:
        try:
            return (yield)
        finally:
            # It reaches a worker's parent with the report of the teardown.
            before, self._until_now = self._until_now, self._taken()
            item.user_properties.append((_PROPERTY, self._until_now - before))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        files: dict[str, list[float]] = defaultdict(list)
        for reports in terminalreporter.stats.values():
            for report in reports:
                if getattr(report, "when", None) == "teardown":
                    taken = dict(report.user_properties).get(_PROPERTY, 0.0)
                    files[report.nodeid.partition("::")[0]].append(taken)
        terminalreporter.section("CPU seconds by file")
        most_first = sorted(files, key=lambda file: sum(files[file]), reverse=True)
        for file in most_first[:_SHOWN]:
            terminalreporter.line(f"{sum(files[file]):8.1f}  {file} ({len(files[file])} tests)")
        total = sum(map(sum, files.values()))
        terminalreporter.line(f"{total:8.1f}  all of {len(files)} files")

    def pytest_unconfigure(self) -> None:
        """Remove the groups, but for those with processes that have not ended yet."""
        (self._folder / "cgroup.procs").write_text(str(os.getpid()))
        for group in self._folder.glob(f"{self._prefix}*"):
            with suppress(OSError):
                group.rmdir()

    def _join(self) -> None:
        """Move this process to a group of its own, with what it starts from now on."""
        if self._process != os.getpid():
            self._process = os.getpid()
            self._group.mkdir()
            (self._group / "cgroup.procs").write_text(str(self._process))
            self._until_now = self._taken()

    @property
    def _group(self) -> Path:
        return self._folder / f"{self._prefix}{self._process}"

    def _taken(self) -> float:
        """Seconds that the group has taken."""
        # `usage_usec N` is the first line of cpu.stat; cpuacct.usage is the number alone.
        line = (self._group / self._file).read_text().split("\n")[0]
        return int(line.split()[-1]) / self._unit
