"""Fixtures of the tests' Kubernetes, for every tests folder, and the skips where programs lack.

A test run builds and installs nothing. A test that needs a program which is not there is skipped,
and a section in capitals at the end of the run says what was left out and which command gets it.
"""

import json
import subprocess
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from . import gateway_crds, gobuild, tools
from .control_plane import ControlPlane
from .node import Node

CRDS = Path(__file__).parents[2] / "crds"
LEFT_OUT = "LEFT OUT: "
"""Prefix of a skip reason that the summary repeats in a section of its own."""
_TO_GET = "TO RUN THEM: {} (ONCE; BUILDS WITH GO 1.26 OR NEWER, UP TO 15 MINUTES)"
_CONTROL_PLANES = 3
"""With one, its users would take longer than all other tests together on the other workers."""
_PROGRAMS = {
    "control_plane_programs": tools.CONTROL_PLANE,
    "helm": ("helm",),
    "promtool": ("promtool",),
    "toxiproxy_program": ("toxiproxy",),
    "versitygw_program": ("versitygw",),
    "chromium_program": ("chromium",),
    "h2spec_program": ("h2spec",),
    "gateway_definitions": (tools.GATEWAY_CRDS,),
    "istiod_program": ("pilot-discovery",),
    "envoy_gateway_program": ("envoy-gateway", tools.GATEWAY_CRDS),
    "kube_router_program": tools.NODE_POLICIES,
    "conformance_program": (gobuild.CONFORMANCE, tools.GATEWAY_CRDS),
    "go_program": ("go",),
    "gcc_program": ("gcc",),
    "ip_program": ("ip",),
}
"""Programs that each fixture needs."""


def group_control_plane_users(items: list[pytest.Item]) -> None:
    """Keep the users of the control plane on few workers, so that few are started."""
    users = [item for item in items if "control_plane" in _fixtures(item)]
    files = sorted({item.path for item in users})
    for item in users:
        group = files.index(item.path) % _CONTROL_PLANES
        item.add_marker(pytest.mark.group(f"control-plane-{group}"))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Skip selected tests whose programs are not there."""
    for fixture, programs in _PROGRAMS.items():
        users = [item for item in session.items if fixture in _fixtures(item)]
        if users and (missing := tools.missing(programs)):
            reason = f"{LEFT_OUT}NO {', '.join(missing)}. {_how_to_get(missing)}"
            for item in users:
                item.add_marker(pytest.mark.skip(reason))


def _how_to_get(missing: Sequence[str]) -> str:
    if set(missing) <= set(tools.INSTALLED):
        return "TO RUN THEM: INSTALL IT"
    if set(missing) <= set(tools.MAKE_TEST):
        return _TO_GET.format("make cluster-tools")
    return _TO_GET.format(f'make cluster-tools ARGS="{" ".join(missing)}"')


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in capitals which tests were left out."""
    counts: dict[str, int] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith(LEFT_OUT):
            counts[reason] = counts.get(reason, 0) + 1
    if counts:
        terminalreporter.section("TESTS LEFT OUT", red=True)
    for reason, count in counts.items():
        terminalreporter.line(f"{count} TESTS DID NOT RUN: {reason.removeprefix(LEFT_OUT)}")


def _fixtures(item: pytest.Item) -> list[str]:
    """Names of the fixtures that the test uses, directly or through others."""
    return getattr(item, "fixturenames", [])


@pytest.fixture(scope="session")
def control_plane_programs() -> None:
    """For tests that start a control plane of their own: they are skipped where it is not built."""


@pytest.fixture(scope="session")
def go_program() -> Path:
    """Go, for tests that fetch a module: they are skipped where it is not installed."""
    return tools.path("go")


def fetched_module(go: Path, module: str) -> Path:
    """The folder of a Go module, `PATH@VERSION`; the test is skipped if it cannot be fetched."""
    command = [str(go), "mod", "download", "-json", module]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"{LEFT_OUT}{module} cannot be fetched: {done.stdout}{done.stderr}")
    return Path(json.loads(done.stdout)["Dir"])


@pytest.fixture(scope="session")
def gcc_program() -> None:
    """For tests that compile C: they are skipped where gcc is not installed."""


@pytest.fixture(scope="session")
def ip_program() -> None:
    """For tests that make networks with iproute2: they are skipped where it is not installed."""


@pytest.fixture(scope="session")
def control_plane(
    control_plane_programs: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlPlane]:
    """A real API server with controllers and no node, shared by all tests of the run."""
    with ControlPlane.running(tmp_path_factory.mktemp("control-plane")) as cluster:
        yield cluster


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A fresh namespace in which pods can be created; deleted after the test without waiting."""
    name = f"test-{uuid.uuid4().hex[:10]}"
    control_plane.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
    account = f"/api/v1/namespaces/{name}/serviceaccounts/default"
    deadline = time.monotonic() + 60
    while not control_plane.serves(account):
        assert time.monotonic() < deadline, f"{name} got no service account"
        time.sleep(0.02)
    yield name
    control_plane.request("DELETE", f"/api/v1/namespaces/{name}")


@pytest.fixture(scope="session")
def crds(control_plane: ControlPlane) -> ControlPlane:
    """The control plane with Tandem's resource definitions established."""
    control_plane.kubectl("apply", "--server-side", f"--filename={CRDS}")
    control_plane.wait_until_established(f"--filename={CRDS}")
    control_plane.restart_controllers()
    return control_plane


@pytest.fixture(scope="session")
def helm() -> None:
    """For tests that run helm: they are skipped where it is not built."""


@pytest.fixture(scope="session")
def promtool() -> None:
    """For tests that run promtool: they are skipped where it is not installed."""


@pytest.fixture(scope="session")
def versitygw_program() -> None:
    """For tests that run versitygw, an S3 server: they are skipped where it is not built."""


@pytest.fixture(scope="session")
def toxiproxy_program() -> None:
    """For tests that run toxiproxy: they are skipped where it is not built."""


@pytest.fixture(scope="session")
def chromium_program() -> Path:
    """The browser, for tests of web pages: they are skipped where it is not installed."""
    return tools.path("chromium")


@pytest.fixture(scope="session")
def h2spec_program() -> Path:
    """h2spec, for tests of HTTP/2: they are skipped where it is not built."""
    return tools.path("h2spec")


@pytest.fixture(scope="session")
def gateway_definitions(control_plane: ControlPlane) -> ControlPlane:
    """The control plane with the definitions of Gateway API, its Inference Extension, Istio and
    Envoy Gateway established."""
    for project in gateway_crds.ALL:
        folder = project.folder(tools.cache())
        control_plane.kubectl("apply", "--server-side", f"--filename={folder}")
        control_plane.wait_until_established(f"--filename={folder}")
    return control_plane


@pytest.fixture(scope="session")
def istiod_program() -> None:
    """For tests that run Istio's control plane: they are skipped where it is not built."""


@pytest.fixture(scope="session")
def envoy_gateway_program() -> None:
    """For tests that run Envoy Gateway: they are skipped where it is not built."""


@pytest.fixture(scope="session")
def kube_router_program() -> None:
    """For tests of NetworkPolicies on the node: they are skipped where it is not built."""


@pytest.fixture(scope="session")
def conformance_program() -> None:
    """For tests that run the conformance suite of gateways: skipped where it is not built."""


@pytest.fixture(scope="session")
def node() -> Node:
    """The single-node Kubernetes that `make cluster-up` started, with the images loaded into it."""
    running = Node()
    if not running.is_up():
        pytest.skip(f"{LEFT_OUT}NO KUBERNETES NODE RUNS HERE. TO RUN THEM: make e2e")
    return running
