"""Fixtures: loads whose outcome does not depend on how busy the test machine is."""

import pytest

from tandem_kvstore import client
from tandem_kvstore.guard.load_guard import Decision, LoadGuard


class PatientGuard(LoadGuard):
    """Always worth it, within a minute. The cost model has its own tests in `tests/kvstore`."""

    def decide(
        self, chunks: int, chunk_tokens: int, chunk_bytes: int, context: int, now: float
    ) -> Decision:
        """All chunks; with the circuit breaker open, as the real guard."""
        if not self.breaker.allows:
            return super().decide(chunks, chunk_tokens, chunk_bytes, context, now)
        return Decision(chunks, 60.0)


@pytest.fixture(autouse=True)
def patient_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of these tests load whatever is stored: a busy machine computes and loads slowly,
    and the real guard then decides by what it has measured."""
    monkeypatch.setattr(client, "LoadGuard", PatientGuard)
