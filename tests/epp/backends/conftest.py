"""Fixtures of the tests of discovery."""

from collections.abc import AsyncIterator

import pytest

from tandem_kube.client import connect

from ...cluster.control_plane import ControlPlane
from .cluster_pods import Pods


@pytest.fixture
async def pods(control_plane: ControlPlane, namespace: str) -> AsyncIterator[Pods]:
    """Pods of a fresh namespace."""
    async with await connect(control_plane.kubeconfig) as api:
        yield Pods(api, namespace)
