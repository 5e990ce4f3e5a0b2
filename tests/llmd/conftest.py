"""llm-d's programs, engines, and a sidecar with scripted engines."""

from pathlib import Path

import pytest

from ..sidecar.conftest import harness
from ..sidecar.real.fixtures import decode, prefill, shared_engines
from .programs import program

__all__ = ["decode", "harness", "prefill", "shared_engines"]


# Of the widest scope, so that nothing is started for tests that are skipped.
@pytest.fixture(scope="session")
def pd_sidecar() -> Path:
    """llm-d's sidecar."""
    return program("pd-sidecar")


@pytest.fixture(scope="session")
def epp_program() -> Path:
    """llm-d's EPP."""
    return program("epp")
