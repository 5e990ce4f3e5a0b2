"""Fixtures of flow control."""

import pytest

from tandem_epp.flow import flows


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas leave room to each other for as long as it takes, also on a busy machine."""
    monkeypatch.setattr(flows, "YIELD_SECONDS", 60.0)
