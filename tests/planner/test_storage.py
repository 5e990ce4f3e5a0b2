"""When loading a prompt from external storage pays."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_planner.cost import PodFigures, RequestFigures, unified_terms
from tandem_planner.storage import (
    CHUNK_TOKENS,
    NO_LOAD,
    STORAGE_PRIOR,
    Load,
    is_served_from_storage,
    worthwhile_load,
)
from tandem_planner.transfer import TransferCost

POD = PodFigures(fixed=0.01, per_token=1e-4, per_pair=0.0)


def test_a_load_pays_within_half_of_the_prefill_that_it_saves() -> None:
    # 1,000 tokens take 100 ms to compute.
    assert worthwhile_load(POD, TransferCost(0.01, 4e-8), 1000, 24, 1024) == Load(1000, 0.05)
    assert worthwhile_load(POD, TransferCost(0.011, 4e-8), 1000, 24, 1024) == NO_LOAD


@pytest.mark.parametrize("cached", [512, 600])
def test_nothing_is_loaded_that_is_cached(cached: int) -> None:
    assert worthwhile_load(POD, TransferCost(0.0, 0.0), 1000, cached, 512) == NO_LOAD


@given(
    per_byte=st.floats(0, 1e-6),
    cached=st.integers(0, 2000),
    stored=st.integers(0, 4000),
    prompt=st.integers(1, 5000),
)
def test_no_request_costs_more_than_if_its_prompt_were_computed(
    per_byte: float, cached: int, stored: int, prompt: int
) -> None:
    cost = STORAGE_PRIOR._replace(per_byte=per_byte)
    stored, cached = min(stored, prompt - 1), min(cached, prompt)
    load = worthwhile_load(POD, cost, 1000, cached, stored)
    request = RequestFigures(prompt, 10.0, 0.0)
    loading = POD._replace(load=load.seconds, loaded=load.tokens)
    with_load = sum(unified_terms(request, loading, cached + load.tokens))
    assert with_load <= sum(unified_terms(request, POD, cached)) + 1e-9


def test_a_prompt_is_served_from_storage_if_at_most_a_chunk_and_less_than_half_is_left() -> None:
    assert is_served_from_storage(1000, 0, Load(768, 0.1))
    assert not is_served_from_storage(1000, 0, Load(1000 - CHUNK_TOKENS - 1, 0.1))
    assert not is_served_from_storage(200, 0, Load(100, 0.1))
    assert not is_served_from_storage(1000, 990, NO_LOAD)
