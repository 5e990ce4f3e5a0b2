"""Fixtures: loads whose outcome does not depend on how busy the test machine is."""

from dataclasses import replace
from pathlib import Path

import pytest

from tandem_kvstore import client
from tandem_kvstore.guard.load_guard import Decision, Hit, LoadGuard, Way

from ..engines import prompt, running
from .asking import LENGTH, ask, storage

FRONT = 2
"""Chunks that `BothGuard` has computed."""


class PatientGuard(LoadGuard):
    """Always worth it, within a minute. The cost model has its own tests in `tests/kvstore`."""

    def decide(self, hit: Hit, now: float) -> Decision:
        """All chunks; with the circuit breaker open, as the real guard."""
        if not self.breaker.allows:
            return super().decide(hit, now)
        return Decision(hit.chunks, 60.0)


class BothGuard(PatientGuard):
    """Computes two chunks and loads the others, however long that takes."""

    max_wait = 60.0

    def decide(self, hit: Hit, now: float) -> Decision:
        decision = super().decide(hit, now)
        if hit.chunks <= FRONT or not decision.chunks:
            return decision
        return replace(decision, way=Way.BOTH, front=FRONT, max_wait=self.max_wait)

    def split(self, hit: Hit) -> tuple[int, float]:
        return max(0, FRONT - hit.context // hit.chunk_tokens), 0.0

    def is_load_sooner(self, tokens: int, context: int, size: int) -> bool:
        return False


@pytest.fixture(autouse=True)
def patient_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of these tests load whatever is stored: a busy machine computes and loads slowly,
    and the real guard then decides by what it has measured."""
    monkeypatch.setattr(client, "LoadGuard", PatientGuard)


@pytest.fixture
async def stored(tmp_path: Path) -> Path:
    """A directory with the KV of `prompt(LENGTH)`."""
    async with running(kv_storage=storage(tmp_path)) as engine:
        await ask(engine, prompt(LENGTH))
    return tmp_path
