"""Conversations that go on after the caches of their pods were emptied."""

import pytest

from .returning import returning

# The simulation gives the picker an index of its own, derived from PrefixTree.
pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("bytes_per_second", [10e9, 3e9])
def test_a_picker_that_knows_the_stores_sends_prompts_where_they_are_loaded(
    bytes_per_second: float,
) -> None:
    without, known = (returning(1, bytes_per_second, knows_stores=knows) for knows in (False, True))
    assert known.loaded > 0.85
    assert known.ttft < 0.8 * without.ttft
    assert known.ttft_p99 <= 1.05 * without.ttft_p99
    assert known.others <= 1.05 * without.others


def test_stores_from_which_loading_does_not_pay_change_no_choice() -> None:
    without, known = (returning(1, 1e9, knows_stores=knows) for knows in (False, True))
    assert known == without
    assert known.loaded == 0.0
