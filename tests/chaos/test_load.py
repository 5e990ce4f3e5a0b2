"""2,000 requests while prefill engines are killed at random and started again."""

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ..sidecar.real.engine import Engine, engines
from ..sidecar.real.pair import FALLBACK, SPLIT, start_pair
from ..sidecar.real.storm import Storm

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1200)]

REQUESTS = 2000


@pytest.fixture
async def prefills(tmp_path: Path) -> AsyncIterator[list[Engine]]:
    engines_to_kill = engines(tmp_path, first={}, second={}, third={})
    try:
        for engine in engines_to_kill:
            engine.begin()
        for engine in engines_to_kill:
            await engine.up()
        yield engines_to_kill
    finally:
        for engine in engines_to_kill:
            with contextlib.suppress(ProcessLookupError):
                engine.kill()


async def test_no_request_hangs_is_truncated_or_wrong(
    decode: Engine, prefills: list[Engine]
) -> None:
    async with start_pair(decode, "--log-level", "error") as pair:
        storm = Storm(pair, prefills, seed=2, between_kills=(60, 140))
        await storm.blow(REQUESTS)
        print(f"\n{storm.summary()}")
        assert len(storm.results) == REQUESTS
        assert storm.unclear() == []
        assert [answer for _, answer in storm.results if answer.error] == [], (
            "the decode engine can always serve"
        )
        assert await storm.wrong(prefills[0]) == []
        finished = await pair.finished_on(SPLIT) + await pair.finished_on(FALLBACK)
        assert finished == REQUESTS
        await pair.wait_until_idle(decode, *prefills)
