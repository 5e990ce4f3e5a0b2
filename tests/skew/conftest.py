"""Engines, and the packages of an older version."""

import os
from pathlib import Path

import pytest

from ..sidecar.real.fixtures import decode, prefill, shared_engines
from .history import extract_older_version

__all__ = ["decode", "prefill", "shared_engines"]

PACKAGES = ("contract", "kube", "planner", "sidecar", "epp")


@pytest.fixture(scope="session")
def older_packages(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The PYTHONPATH with which a process runs the older version."""
    folder: Path = tmp_path_factory.mktemp("older")
    extract_older_version(folder, *PACKAGES)
    return os.pathsep.join(str(folder / package) for package in PACKAGES)
