"""The fixtures every tests folder sees, and what they say when a cluster cannot be had.

What is missing is built before the first test, outside any test's time limit; when that cannot
be done the tests are skipped and the summary says so.
"""

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from . import tools
from .control_plane import ControlPlane
from .node import Node

CRDS = Path(__file__).parents[2] / "crds"
_MISSING = pytest.StashKey[str]()
_NO_NODE = pytest.StashKey[bool]()


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    wanted = any("control_plane" in item.fixturenames for item in _functions(session))
    if config.option.collectonly or not wanted:
        return
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    try:
        tools.ensure(tools.CONTROL_PLANE, reporter.write_line if reporter else print)
    except tools.MissingTool as missing:
        config.stash[_MISSING] = str(missing)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    missing = terminalreporter.config.stash.get(_MISSING, None)
    if missing is not None:
        terminalreporter.section("CONTROL PLANE TESTS SKIPPED", red=True)
        terminalreporter.line(f"THE TESTS AGAINST A REAL KUBERNETES API DID NOT RUN: {missing}")
    if terminalreporter.config.stash.get(_NO_NODE, False):
        terminalreporter.section("NODE TESTS SKIPPED", red=True)
        terminalreporter.line("THE TESTS ON A WHOLE KUBERNETES DID NOT RUN: use `make e2e`")


def _functions(session: pytest.Session) -> list[pytest.Function]:
    return [item for item in session.items if isinstance(item, pytest.Function)]


@pytest.fixture(scope="session")
def control_plane(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """A real API server with controllers and no node, shared by all tests of the run."""
    if (missing := request.config.stash.get(_MISSING, None)) is not None:
        pytest.skip(missing)
    with ControlPlane.running(tmp_path_factory.mktemp("control-plane")) as cluster:
        yield cluster


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace, able to take pods; its deletion is not waited for."""
    name = f"test-{uuid.uuid4().hex[:10]}"
    control_plane.kubectl("create", "namespace", name)
    control_plane.kubectl(
        *("wait", "--for=create", "serviceaccount/default"),
        *(f"--namespace={name}", "--timeout=60s"),
    )
    yield name
    control_plane.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def crds(control_plane: ControlPlane) -> ControlPlane:
    """The control plane with Tandem's resource definitions established."""
    control_plane.kubectl("apply", "--server-side", f"--filename={CRDS}")
    control_plane.kubectl(
        *("wait", "--for=condition=Established", f"--filename={CRDS}", "--timeout=60s")
    )
    control_plane.restart_controllers()
    return control_plane


@pytest.fixture(scope="session")
def node(request: pytest.FixtureRequest) -> Node:
    """The single-node Kubernetes that `make cluster-up` started, with the images loaded into it."""
    running = Node()
    if not running.is_up():
        request.config.stash[_NO_NODE] = True
        pytest.skip("no node is up: make e2e")
    return running
