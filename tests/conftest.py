"""What every test shares."""

from hypothesis import settings

from .cluster.fixtures import (
    control_plane,
    crds,
    namespace,
    node,
    pytest_collection_finish,
    pytest_terminal_summary,
)

__all__ = [
    "control_plane",
    "crds",
    "namespace",
    "node",
    "pytest_collection_finish",
    "pytest_terminal_summary",
]

# How long an example takes is the machine's load, not a finding.
settings.register_profile("house", deadline=None)
settings.load_profile("house")
