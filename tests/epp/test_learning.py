"""What the EPP learns of the reference engine, with its header and without it.

The engine's durations are declared, so that the error does not depend on how busy the machine is.
`python -m benchmarks.learning` prints it for durations as they really are.
"""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tandem_contract.pod_reports import Source

from ..sidecar.real.engine import SERVED, Engine, engines
from .declared_engine import COST, DEVIATION, declare_times
from .learning import ENGINE, Requests, learn

LIMIT = 0.1
"""Largest median error: nothing disturbs declared durations but DEVIATION."""

pytestmark = [pytest.mark.component, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    kind = {"flags": ("--dtype", "float32"), "prepare": declare_times}
    [running] = engines(tmp_path_factory.mktemp("engine"), engine=kind)
    try:
        await running.up()
        yield running
    finally:
        with contextlib.suppress(ProcessLookupError):
            running.kill()


@pytest.mark.parametrize(
    ("is_stream", "has_timing"),
    [
        pytest.param(False, True, id="the engine's report"),
        pytest.param(True, False, id="streams without the header"),
    ],
)
async def test_the_estimate_is_the_engines_own_prefill_time(
    engine: Engine, tmp_path: Path, is_stream: bool, has_timing: bool
) -> None:
    backend = {"name": ENGINE, "url": engine.url, "role": "unified", "models": [SERVED]}
    requests = Requests(SERVED, is_stream=is_stream, has_timing=has_timing)
    learned = await learn(tmp_path, engine.url, [backend], requests)
    # The metric is the truth: it has what was declared, but for what comes before the first step.
    for length, seconds in learned.requests:
        assert seconds == pytest.approx(COST.seconds(length), rel=DEVIATION + 1e-6)
    assert learned.estimate.source is Source.LEARNED
    assert learned.estimate.age is not None
    truth = {length: COST.seconds(length) for length, _ in learned.requests}
    error = learned.error(truth)
    print(f"{learned.estimate.samples} samples: the EPP errs by {error:.1%} (median)")
    assert error <= LIMIT
