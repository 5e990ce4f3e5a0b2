"""Fixtures and hooks of all tests."""

import gc
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from . import preloaded, rewriting, workers
from .bare.recorder import record
from .browser import browser, tab
from .cluster.fixtures import (
    chromium_program,
    conformance_program,
    control_plane,
    control_plane_programs,
    crds,
    envoy_gateway_program,
    gateway_definitions,
    gcc_program,
    go_program,
    group_control_plane_users,
    h2spec_program,
    helm,
    ip_program,
    istiod_program,
    kube_router_program,
    namespace,
    node,
    promtool,
    pytest_collection_finish,
    pytest_terminal_summary,
    toxiproxy_program,
    versitygw_program,
)
from .processor_time import ProcessorTime

__all__ = [
    "browser",
    "chromium_program",
    "conformance_program",
    "control_plane",
    "control_plane_programs",
    "crds",
    "envoy_gateway_program",
    "gateway_definitions",
    "gcc_program",
    "go_program",
    "h2spec_program",
    "helm",
    "ip_program",
    "istiod_program",
    "kube_router_program",
    "namespace",
    "node",
    "promtool",
    "pytest_collection_finish",
    "pytest_terminal_summary",
    "tab",
    "toxiproxy_program",
    "versitygw_program",
]

_LONG = ("control_plane", "component")
"""Markers of tests that take long, the longest first."""

_AUTHORITY = Path(__file__).with_name("authority.pem")
"""The only authority in the system's file of trusted ones, as far as programs under test see it. To
read all 140 takes 50 ms of CPU each time that a program or a router prepares for TLS."""

# No limits on time: how long an example takes, and to generate, depends on the machine's load.
settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--workers",
        type=int,
        default=0,
        metavar="N",
        help="run the tests on N processes, forks of this one; 0: on this one",
    )
    parser.addoption(
        "--cpu",
        action="store_true",
        help="show which files take most CPU time, with all processes of their tests (root)",
    )


def pytest_configure(config: pytest.Config) -> None:
    record(config)
    if config.getoption("--cpu"):
        config.pluginmanager.register(ProcessorTime())
    os.environ.setdefault("SSL_CERT_FILE", str(_AUTHORITY))
    # API servers, kubectl, helm and Istio collect garbage less often: a fifth of their CPU time.
    os.environ.setdefault("GOGC", "400")
    preloaded.install()
    rewriting.rewrite_all(config)
    # Collection makes millions of objects that stay, which the collector would visit many times.
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    # A collection would write to the pages that all workers share.
    gc.freeze()
    gc.enable()
    return workers.run(session)


@pytest.fixture
def own_logging() -> Iterator[None]:
    """For tests that configure the sidecar's log: as before, afterwards. A handler of a test before
    them, which would be used again, writes to what was stderr then."""
    root, ours = logging.getLogger(), logging.getLogger("tandem_sidecar")
    # pytest's own are of other types.
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
    root.setLevel(levels[0])
    ours.setLevel(levels[1])


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests take long come first, so that no worker has one alone at the end."""
    group_control_plane_users(items)
    ranks: dict[Path, int] = {}
    for item in items:
        rank = next((rank for rank, name in enumerate(_LONG) if item.get_closest_marker(name)), 9)
        ranks[item.path] = min(rank, ranks.get(item.path, rank))
    items.sort(key=lambda item: ranks[item.path])
