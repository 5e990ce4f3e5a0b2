"""Hand-offs through storage between two engines of the connector, without vLLM."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tandem_contract.kv_reference import KvReference, read_reference
from tandem_kvstore.client import StoreClient
from tandem_kvstore.errors import Reason
from tandem_vllm_storage import handoff

from .sides import CHUNK, Engine, FakeRequest, Requests

MakeEngine = Callable[..., Engine]
LIMIT = 120.0
TOKENS = list(range(2 * CHUNK + 3))
BLOCKS = [0, 1, 2, 3, 4]


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[MakeEngine]:
    engines: list[Engine] = []

    def make(**options: Any) -> Engine:
        engines.append(Engine(tmp_path, **options))
        return engines[-1]

    yield make
    for each in engines:
        each.close()


def prefill(tokens: list[int], timeout: float = LIMIT, **fields: Any) -> FakeRequest:
    leg = {"tandem_kv_store": {"timeout": timeout}}
    return FakeRequest("p", list(tokens), kv_transfer_params=leg, **fields)


def decode(tokens: list[int], reference: KvReference, limit: float = LIMIT) -> FakeRequest:
    params = {
        "tandem_kv_reference": msgspec.to_builtins(reference),
        "tandem_kv_load_timeout": limit,
    }
    return FakeRequest("d", list(tokens), kv_transfer_params=params)


def answer(engine: Engine, request: FakeRequest) -> dict[str, Any] | None:
    """Compute a prefill leg, as vLLM does; returns its `kv_transfer_params`."""
    engine.ask(request)
    engine.step((request, BLOCKS, 0, request.num_tokens))
    request.tokens.append(7)
    while request.num_output_tokens < request.max_tokens:
        # The request's own next token; its blocks need not be written for it.
        engine.step((request, BLOCKS, request.num_tokens - 1, 1))
        if request.num_tokens < 3 * CHUNK:
            request.tokens.append(7)
    return engine.scheduler.finish(request.request_id)


def named(engine: Engine, tokens: list[int] = TOKENS) -> KvReference:
    params = answer(engine, prefill(tokens))
    assert params is not None
    return read_reference(params["tandem_kv_reference"])


def test_the_answer_names_kv_that_is_visible_and_decode_loads_it(
    engine: MakeEngine, tmp_path: Path
) -> None:
    reference = named(engine())
    assert reference.token_count == 2 * CHUNK
    assert (tmp_path / reference.path).exists()

    second = engine()
    assert second.load(decode(TOKENS, reference), [9, 8, 7, 6, 5]) == set()
    assert (second.counted.loaded, second.counted.transfers) == (2 * CHUNK, 1)
    assert second.counted.failed_transfers == 0


def test_a_prefill_leg_goes_on_until_its_kv_is_stored(engine: MakeEngine) -> None:
    first = engine()
    request = prefill(TOKENS)
    first.ask(request)
    assert request.max_tokens > 1
    assert request.sampling_params.max_tokens == request.max_tokens
    first.scheduler.orders([(request, BLOCKS, 0, request.num_tokens)])
    request.tokens.append(7)
    # No worker has reported its saves.
    first.scheduler.orders([(request, BLOCKS, len(TOKENS), 1)])
    assert request.max_tokens > request.num_output_tokens
    assert first.scheduler.finish("p") is None


def test_a_leg_whose_time_is_over_says_so(engine: MakeEngine) -> None:
    request, first = prefill(TOKENS, timeout=1e-9), engine()
    first.ask(request)
    first.scheduler.orders([(request, BLOCKS, 0, request.num_tokens)])
    request.tokens.append(7)
    while request.max_tokens > request.num_output_tokens:
        first.scheduler.orders([])
    assert first.scheduler.finish("p") == {"tandem_kv_not_stored": "timeout"}


def test_at_the_end_of_its_time_a_leg_names_what_is_stored(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The time in which writes are waited for is over at once, that of the look-up is not.
    monkeypatch.setattr(handoff, "_LOOK_UP_SHARE", 1.0)
    first = engine()
    first.compute(FakeRequest("before", TOKENS[:CHUNK]), BLOCKS, 1.0)
    request = prefill(TOKENS, timeout=LIMIT)
    first.ask(request)
    # The second chunk's worker never reports its save.
    first.scheduler.orders([(request, BLOCKS, 0, request.num_tokens)])
    request.tokens.append(7)
    while request.max_tokens > request.num_output_tokens:
        first.scheduler.orders([])
    params = first.scheduler.finish("p")
    assert params is not None
    assert read_reference(params["tandem_kv_reference"]).token_count == CHUNK


@pytest.mark.parametrize("space", [0, 1, 50])
def test_a_waiting_leg_generates_up_to_the_models_longest_sequence(
    engine: MakeEngine, space: int
) -> None:
    request, first = prefill(TOKENS), engine(max_tokens=len(TOKENS) + space)
    first.ask(request)
    # Never less than the request asked for.
    assert request.max_tokens == max(space, 1)
    assert request.sampling_params.max_tokens == request.max_tokens


def test_a_prompt_shorter_than_a_chunk_stores_nothing(engine: MakeEngine) -> None:
    assert answer(engine(), prefill(TOKENS[: CHUNK - 1])) == {"tandem_kv_not_stored": "short"}


def test_a_prompt_that_must_not_be_stored_is_no_short_one(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Requests, "prompt", lambda *_: None)
    assert answer(engine(), prefill(TOKENS)) == {"tandem_kv_not_stored": "other"}


def test_a_store_that_does_not_answer_is_named(engine: MakeEngine) -> None:
    params = answer(engine(endpoint="http://127.0.0.1:9"), prefill(TOKENS))
    assert params is not None
    assert set(params) == {"tandem_kv_not_stored"}


def test_a_defect_of_the_look_up_costs_a_recompute(
    engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = named(engine())

    async def find(*_: object) -> tuple[int, Reason | None]:
        raise ZeroDivisionError

    monkeypatch.setattr(StoreClient, "find", find)
    assert answer(engine(), prefill(TOKENS)) == {"tandem_kv_not_stored": "other"}
    second = engine()
    assert second.ask(decode(TOKENS, reference)) == 0
    assert second.counted.failed_transfers == 1


def test_a_leg_with_a_grammar_ends_as_it_would(engine: MakeEngine) -> None:
    request = prefill(TOKENS, use_structured_output=True)
    first = engine()
    first.ask(request)
    assert request.max_tokens == 1
    assert first.scheduler.finish("p") is None


@pytest.mark.parametrize("change", ["prompt", "namespace", "unreadable"])
def test_a_reference_that_is_not_the_engines_own_reads_nothing(
    engine: MakeEngine, change: str
) -> None:
    reference = named(engine())
    second = engine()
    if change == "namespace":
        path = f"elsewhere/{reference.prefix_hash}"
        reference = msgspec.structs.replace(reference, path=path)
    if change == "unreadable":
        reference = msgspec.structs.replace(reference, tensor_format="tandem-kv/0")
    # Another prompt, so that the engine's own look-up finds nothing either.
    request = decode([t + 1 for t in TOKENS], reference)
    assert second.ask(request) == 0
    assert second.counted.failed_transfers == (change != "unreadable")
    assert second.counted.transfers == 0


def test_kv_that_left_between_the_legs_is_computed(engine: MakeEngine, tmp_path: Path) -> None:
    reference = named(engine())
    (tmp_path / reference.path).unlink()
    second = engine()
    assert second.ask(decode(TOKENS, reference)) == CHUNK
    assert second.counted.failed_transfers == 1
    assert second.counted.not_loaded == [Reason.MISSING]


def test_a_load_that_fails_is_a_failed_transfer(engine: MakeEngine, tmp_path: Path) -> None:
    reference = named(engine())
    for file in tmp_path.rglob("?" * 64):
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    second = engine()
    assert second.load(decode(TOKENS, reference), [9, 8, 7, 6, 5]) == {"d"}
    assert (second.counted.failed_transfers, second.counted.transfers) == (1, 0)


def test_kv_that_is_cached_already_is_no_transfer(engine: MakeEngine) -> None:
    reference = named(engine())
    second = engine()
    assert second.ask(decode(TOKENS, reference), computed=2 * CHUNK) == 0
    assert (second.counted.failed_transfers, second.counted.transfers) == (0, 0)
