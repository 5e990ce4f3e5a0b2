"""A few hundred requests while each prefill engine dies once; `tests/chaos` has thousands."""

import pytest

from .engine import Engine
from .pair import paired
from .storm import Storm

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]


async def test_dying_prefill_engines_cost_no_answer(
    decode: Engine, prefill: Engine, second: Engine
) -> None:
    async with paired(decode, "--log-level", "error") as pair:
        storm = Storm(pair, (prefill, second), seed=1, between_kills=(60, 80))
        await storm.blow(200)
        print(storm.summary())
        assert [told.error for _, told in storm.told if told.error] == []
        assert await storm.wrong(prefill) == []
        await pair.at_rest(decode, prefill, second)
