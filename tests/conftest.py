"""Fixtures and hooks of all tests."""

import gc
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadGroupScheduling

from . import preloaded, rewriting
from .bare.recorder import record
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

__all__ = [
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
    "toxiproxy_program",
    "versitygw_program",
]

_LONG = ("control_plane", "component")
"""Markers of tests that take long, the longest first."""

# No limits on time: how long an example takes, and to generate, depends on the machine's load.
settings.register_profile("tandem", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tandem")


def pytest_configure(config: pytest.Config) -> None:
    record(config)
    preloaded.install()
    rewriting.write_share(config)
    # Collection makes millions of objects that stay, which the collector would visit many times.
    gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def own_logging() -> Iterator[None]:
    """For tests that configure the sidecar's log: as before, afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("tandem_sidecar")
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


class FileScheduling(LoadGroupScheduling):
    """Gives each worker whole groups (`xdist_group`) and whole files, for shared fixtures."""

    def _split_scope(self, nodeid: str) -> str:
        group: str = super()._split_scope(nodeid)  # the whole node id when it has no group
        return group.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> FileScheduling | None:
    """Schedule by file under `--dist loadgroup`."""
    return FileScheduling(config, log) if config.getoption("dist") == "loadgroup" else None
