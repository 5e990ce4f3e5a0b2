"""Runs tests on several processes, all forks of the one that has collected the tests.

So tests are imported and collected once, and not once more by each process. With `--workers 4`,
four workers run one unit after the other: a file, or the files whose tests share a `group` mark, so
that fixtures of module scope are set up once. A worker that ends (a crash of the interpreter) fails
the test that it ran; a new one goes on with the rest of its unit.
"""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, cast

import pytest

Unit = list[int]
"""Places of tests among all that were collected."""


def run(session: pytest.Session) -> bool | None:
    """Run the collected tests on `--workers` processes. None: nothing was done."""
    count = session.config.getoption("--workers")
    # A fork of a process that uses Apple's libraries may crash.
    if count < 1 or sys.platform != "linux" or session.config.option.collectonly:
        return None
    if session.testsfailed:
        return None  # The collection failed, which pytest's own loop reports.
    _Run(session, units_of(session.items)).finish(count)
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)
    return True


def units_of(items: Sequence[pytest.Item]) -> list[Unit]:
    """The tests by group or file, in the order of each one's first test."""
    units: dict[object, Unit] = {}
    for place, item in enumerate(items):
        mark = item.get_closest_marker("group")
        units.setdefault(mark.args if mark else item.path, []).append(place)
    return list(units.values())


class _Run:
    """The side of the process that has collected: gives units, and passes reports on."""

    def __init__(self, session: pytest.Session, units: Sequence[Unit]) -> None:
        self._session = session
        self._hook = session.config.hook
        self._units = deque(units)
        self._workers: dict[Connection, tuple[BaseProcess, Unit]] = {}
        """Each worker's connection, and the tests that it was given and has not ended."""
        self._started = 0

    def finish(self, count: int) -> None:
        """Run all tests on `count` workers."""
        try:
            for _ in range(min(count, len(self._units))):
                self._start()
            while self._workers and not self._is_stopped():
                for connection in wait(list(self._workers)):
                    self._receive(cast(Connection, connection))
        finally:
            for connection in self._workers:
                connection.close()
            for process, _ in self._workers.values():
                process.join()

    def _is_stopped(self) -> bool:
        return bool(self._session.shouldfail or self._session.shouldstop)

    def _start(self) -> None:
        fork = get_context("fork")
        ours, theirs = fork.Pipe()
        process = fork.Process(
            target=_work, args=(self._session, theirs, [ours, *self._workers], self._started)
        )
        process.start()
        theirs.close()
        self._started += 1
        self._workers[ours] = (process, [])

    def _receive(self, connection: Connection) -> None:
        _, unit = self._workers[connection]
        try:
            kind, content = connection.recv()
        except (EOFError, ConnectionResetError):
            self._end(connection)
            return
        if kind == "more":
            self._give(connection, unit)
        elif kind == "report":
            report = self._hook.pytest_report_from_serializable(
                config=self._session.config, data=content
            )
            self._hook.pytest_runtest_logreport(report=report)
        else:
            item = self._session.items[unit.pop(0)]
            self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)

    def _give(self, connection: Connection, unit: Unit) -> None:
        """Send the next unit; an empty one at the end of the run."""
        added = self._units.popleft() if self._units else []
        unit += added
        # A worker that has ended meanwhile is noticed at its connection's end.
        with suppress(BrokenPipeError):
            connection.send(added)

    def _end(self, connection: Connection) -> None:
        process, unit = self._workers.pop(connection)
        connection.close()
        process.join()
        if not unit:
            return
        item = self._session.items[unit.pop(0)]
        report = pytest.TestReport(
            nodeid=item.nodeid,
            location=item.location,
            keywords={},
            outcome="failed",
            longrepr=f"The worker that ran this test ended with {process.exitcode}.",
            when="call",
        )
        self._hook.pytest_runtest_logreport(report=report)
        if unit:
            self._units.appendleft(unit)
        if self._units:
            self._start()


def _work(
    session: pytest.Session, connection: Connection, others: Sequence[Connection], number: int
) -> None:
    """The side of a worker. `others`: the connections of the parent, to close."""
    for other in others:
        other.close()
    config = session.config
    _prepare(config, number)
    config.pluginmanager.register(_Reporter(config, connection))
    items = _items(session, connection)
    item: pytest.Item | None = None
    try:
        item = next(items, None)
        while item is not None and not (session.shouldfail or session.shouldstop):
            following = next(items, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            connection.send(("end", None))
            item = following
    except (KeyboardInterrupt, BrokenPipeError, EOFError):
        # The parent has ended, or ends. Fixtures end what they have started.
        if item is not None:
            config.hook.pytest_runtest_teardown(item=item, nextitem=None)


def _items(session: pytest.Session, connection: Connection) -> Iterator[pytest.Item]:
    """The tests that the parent gives. It asks for a unit when the last test of the one before is
    about to run, which must know its follower, so that common fixtures stay."""
    while True:
        connection.send(("more", None))
        if not (unit := connection.recv()):
            return
        for place in unit:
            yield session.items[place]


def _prepare(config: pytest.Config, number: int) -> None:
    """Give this worker its own temporary folder and its own files for captured output."""
    # The terminal belongs to the parent.
    config.pluginmanager.unregister(name="terminalreporter")
    # A folder of its own: to number a folder, pytest reads the names of those beside it.
    folders = config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"worker-{number}"
    folders._basetemp.mkdir()
    # Forks share their files' positions.
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()


class _Reporter:
    """Sends what the worker's tests report to the parent."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config = config
        self._connection = connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))
