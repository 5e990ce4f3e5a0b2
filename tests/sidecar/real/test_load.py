"""A few hundred requests while each prefill engine dies once; `tests/chaos` has thousands."""

import pytest

from .engine import Engine
from .pair import start_pair
from .storm import Storm

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]


async def test_dying_prefill_engines_cost_no_answer(
    decode: Engine, prefill: Engine, second_prefill: Engine
) -> None:
    async with start_pair(decode, "--log-level", "error") as pair:
        storm = Storm(pair, (prefill, second_prefill), seed=1, between_kills=(60, 80))
        await storm.blow(200)
        print(storm.summary())
        assert [result.error for _, result in storm.results if result.error] == []
        assert await storm.wrong(prefill) == []
        await pair.wait_until_idle(decode, prefill, second_prefill)
