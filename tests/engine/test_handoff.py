"""Hand-offs between two engines in one process, with KV over TCP."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from tandem_contract.prefix import prompt_hash
from tandem_contract.transfer_params import TransferParams, transfer_params_from_object
from tandem_engine.config import KvRole
from tandem_engine.engine import Engine
from tandem_engine.tiers.settings import KvStorageConfig
from tandem_engine.types import (
    ConfigError,
    LoadFailurePolicy,
    PromptContradictsKv,
    RemoteDecode,
    Request,
)
from tandem_kvstore import client
from tandem_kvstore.stores.files import FileStore

from .engines import GREEDY, Tally, all_free, expected, finish, prompt, running, transfer, until
from .tiers.conftest import FRONT, BothGuard, PatientGuard

pytestmark = pytest.mark.long


class Pair:
    """A prefill engine P and a decode engine D, with their counts."""

    def __init__(
        self,
        *,
        lease: float = 30.0,
        policy: LoadFailurePolicy = LoadFailurePolicy.RECOMPUTE,
        decode_blocks: int = 64,
        prefill_blocks: int = 64,
        prefill_tokens: int = 2048,
        storage: KvStorageConfig | None = None,
    ) -> None:
        self.counts_p, self.counts_d = Tally(), Tally()
        self._p = running(
            self.counts_p,
            kv_transfer=transfer(KvRole.PRODUCER, "P", lease=lease),
            max_num_batched_tokens=prefill_tokens,
            num_blocks=prefill_blocks,
            kv_storage=storage,
        )
        self._d = running(
            self.counts_d,
            kv_transfer=transfer(KvRole.CONSUMER, "D", policy=policy),
            num_blocks=decode_blocks,
            kv_storage=storage,
        )
        self._stack = AsyncExitStack()
        self.p: Engine
        self.d: Engine

    async def __aenter__(self) -> "Pair":
        self.p = await self._stack.enter_async_context(self._p)
        self.d = await self._stack.enter_async_context(self._d)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def prefill(self, request_id: str, tokens: tuple[int, ...]) -> TransferParams:
        """Prefill on P. Returns the transfer parameters of its answer."""
        request = Request(request_id, tokens, GREEDY(max_tokens=9), RemoteDecode())
        answer, last = await finish(self.p.submit(request))
        assert answer == expected(tokens, 1)
        assert last.finish_reason == "length"
        assert last.kv_transfer_params is not None
        return transfer_params_from_object(last.kv_transfer_params)

    def decode(self, request_id: str, tokens: tuple[int, ...], params: TransferParams) -> Request:
        return Request(request_id, tokens, GREEDY(max_tokens=8), params)


async def computed_before_and_after_a_restart(directory: Path) -> list[int]:
    """Tokens that P computes of a prompt of six chunks of 32 tokens and 8 tokens more."""
    storage = KvStorageConfig(endpoint=f"file://{directory}", chunk_tokens=32)
    tokens = prompt(200)
    computed = []
    for _ in range(2):
        async with Pair(storage=storage) as pair:
            params = await pair.prefill("a", tokens)
            answer, _ = await finish(pair.d.submit(pair.decode("b", tokens, params)))
            assert answer == expected(tokens, 8)
        computed.append(pair.counts_p.counts["computed"])
    return computed


async def test_after_both_engines_restarted_nothing_is_computed_again(tmp_path: Path) -> None:
    # The second time, what is beyond the last full chunk.
    assert await computed_before_and_after_a_restart(tmp_path) == [200, 200 - 6 * 32]


async def test_a_prefill_computes_the_front_while_the_rear_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LoadGuard", BothGuard)
    computed = await computed_before_and_after_a_restart(tmp_path)
    assert computed == [200, 200 - (6 - FRONT) * 32]


@pytest.mark.parametrize("length", [2, 15, 16, 17, 32, 100])
async def test_a_hand_off_answers_as_a_single_engine_does(length: int) -> None:
    async with Pair() as pair:
        params = await pair.prefill("a", prompt(length))
        assert params.remote_num_tokens == length
        generation = pair.d.submit(pair.decode("b", prompt(length), params))
        first = await anext(generation)
        later_ids, _ = await finish(generation)
        assert [*first.token_ids, *later_ids] == expected(prompt(length), 8)
        assert first.timing is not None
        assert first.timing.bytes == pair.counts_d.counts["pulled_bytes"] > 0
        # The last token of a prompt is always computed. vLLM's counters say that it was pulled.
        assert first.timing.computed == 1
        assert pair.counts_d.counts["computed"] == 0
        await until(lambda: all_free(pair.p))
    assert pair.counts_d.counts["external_hits"] == pair.counts_d.counts["external"] == length
    assert pair.counts_p.counts["expired"] == 0


async def test_only_what_is_not_cached_is_pulled_and_pulled_blocks_are_cached() -> None:
    tokens = prompt(100)
    async with Pair() as pair:
        await finish(pair.d.submit(Request("warm", tokens[:50], GREEDY(max_tokens=1))))
        params = await pair.prefill("a", tokens)
        answer, _ = await finish(pair.d.submit(pair.decode("b", tokens, params)))
        assert answer == expected(tokens, 8)
        assert pair.counts_d.counts["external_hits"] == 52
        await finish(pair.d.submit(Request("again", tokens, GREEDY(max_tokens=1))))
        assert pair.counts_d.counts["hits"] == 48 + 96


async def test_kv_of_a_prompt_that_is_cached_here_is_released_unread() -> None:
    tokens = prompt(64)
    async with Pair() as pair:
        await finish(pair.d.submit(Request("warm", tokens, GREEDY(max_tokens=1))))
        params = await pair.prefill("a", tokens)
        answer, _ = await finish(pair.d.submit(pair.decode("b", tokens, params)))
        assert answer == expected(tokens, 8)
        await until(lambda: all_free(pair.p))
    assert pair.counts_d.counts["pulls"] == 0


def named(pair: Pair, tokens: tuple[int, ...]) -> TransferParams:
    """The parameters of the prompt "a" before its prefill has answered."""
    assert pair.p.side_channel is not None
    blocks, hashed = (tuple(range(19)),), prompt_hash(tokens)
    return TransferParams("P", "a", *pair.p.side_channel, blocks, 300, tandem_prompt_hash=hashed)


async def test_a_reader_may_start_before_the_prefill_ends() -> None:
    tokens = prompt(300)
    async with Pair(prefill_tokens=16) as pair:
        prefill = pair.p.submit(Request("a", tokens, GREEDY(max_tokens=1), RemoteDecode()))
        params = named(pair, tokens)
        decode = pair.d.submit(pair.decode("b", tokens, params))
        answer, _ = await finish(decode)
        await finish(prefill)
        assert answer == expected(tokens, 8)
    assert pair.counts_d.counts["pull_failures"] == 0


@pytest.mark.parametrize("policy", list(LoadFailurePolicy))
@pytest.mark.parametrize("wrong", ["request", "engine", "blocks"])
async def test_what_follows_a_failed_load(policy: LoadFailurePolicy, wrong: str) -> None:
    tokens = prompt(50)
    changes = {
        "request": {"remote_request_id": "another"},
        "engine": {"remote_engine_id": "another"},
        "blocks": {"remote_block_ids": ((1, 2, 3),)},
    }
    async with Pair(policy=policy) as pair:
        params = await pair.prefill("a", tokens)
        generation = pair.d.submit(
            pair.decode("b", tokens, replace(params, **changes[wrong]))  # type: ignore[arg-type]  # one field each
        )
        answer, last = await finish(generation)
        if policy is LoadFailurePolicy.RECOMPUTE:
            assert answer == expected(tokens, 8)
        else:
            assert (answer, last.finish_reason) == ([], "error")
            assert "remote KV could not be loaded" in (last.error or "")
        assert pair.d.healthy
        assert pair.counts_d.counts["pull_failures"] == 1
        await pair.d.release_remote_hold(params)
        await until(lambda: all_free(pair.p))


async def test_after_a_failed_pull_stored_kv_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restart of the prefill engine, whose former id the decode leg names."""
    monkeypatch.setattr(client, "LoadGuard", PatientGuard)
    tokens = prompt(200)
    storage = KvStorageConfig(endpoint=f"file://{tmp_path}", chunk_tokens=32)
    async with running(kv_storage=storage) as engine:
        await finish(engine.submit(Request("stored", tokens, GREEDY(max_tokens=1))))
    async with Pair(storage=storage) as pair:
        params = await pair.prefill("a", tokens)
        wrong = replace(params, remote_engine_id="another")
        answer, _ = await finish(pair.d.submit(pair.decode("b", tokens, wrong)))
        assert answer == expected(tokens, 8)
        await pair.d.release_remote_hold(params)
        await until(lambda: all_free(pair.p))
    counts = pair.counts_d.counts
    assert (counts["pull_failures"], counts["pulls"]) == (1, 0)
    assert (counts["storage_loaded"], counts["computed"]) == (6 * 32, 200 - 6 * 32)
    assert (counts["external_queries"], counts["external_hits"]) == (200, 6 * 32)


async def test_a_request_that_is_aborted_while_it_loads_instead_of_pulling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tally, loads, forever = Tally(), asyncio.Event(), asyncio.Event()

    async def stalled(*_: object, **__: object) -> None:
        loads.set()
        await forever.wait()

    monkeypatch.setattr(FileStore, "get", stalled)
    tokens = prompt(200)
    storage = KvStorageConfig(endpoint=f"file://{tmp_path}", chunk_tokens=32)
    monkeypatch.setattr(client, "LoadGuard", PatientGuard)
    async with (
        Pair() as pair,
        running(tally, kv_transfer=transfer(KvRole.CONSUMER, "S"), kv_storage=storage) as reader,
        asyncio.timeout(60),
    ):
        params = await pair.prefill("a", tokens)
        wrong = replace(params, remote_engine_id="another")
        generation = reader.submit(pair.decode("b", tokens, wrong))
        await loads.wait()
        reader.abort("b")
        assert (await finish(generation))[1].finish_reason == "abort"
        await until(lambda: all_free(reader))
        await reader.release_remote_hold(params)
    assert tally.counts["computed"] == 0


@pytest.mark.parametrize("policy", list(LoadFailurePolicy))
@pytest.mark.parametrize("other", [(*prompt(49), 3), prompt(49), prompt(1)])
async def test_a_prompt_that_contradicts_its_kv_is_refused(
    policy: LoadFailurePolicy, other: tuple[int, ...]
) -> None:
    async with Pair(policy=policy) as pair:
        params = await pair.prefill("a", prompt(50))
        with pytest.raises(PromptContradictsKv, match="Send the prompt that the prefill engine"):
            pair.d.submit(pair.decode("b", other, params))
        assert await finish(pair.d.submit(Request("c", other, GREEDY(max_tokens=2)))) is not None
        await pair.d.release_remote_hold(params)
        await until(lambda: all_free(pair.p))
    assert pair.counts_d.counts["pulls"] == 0
    assert pair.counts_p.counts["expired"] == 0


async def test_abort_during_the_pull_frees_both_sides() -> None:
    tokens = prompt(300)
    async with Pair(prefill_tokens=16) as pair:
        prefill = pair.p.submit(Request("a", tokens, GREEDY(max_tokens=1), RemoteDecode()))
        params = named(pair, tokens)
        decode = pair.d.submit(pair.decode("b", tokens, params))
        await until(lambda: pair.d.stats().waiting_for_kv == 1)
        pair.d.abort("b")
        assert (await finish(decode))[1].finish_reason == "abort"
        await until(lambda: all_free(pair.d))
        await finish(prefill)
        await until(lambda: all_free(pair.p))
    assert pair.counts_p.counts["expired"] == 0


async def test_a_decode_leg_waits_for_blocks_with_its_lease_renewed() -> None:
    tokens = prompt(60)
    async with Pair(lease=1.0, decode_blocks=6) as pair:
        first = pair.d.submit(Request("busy", prompt(40, 1), GREEDY(max_tokens=50)))
        await anext(first)
        params = await pair.prefill("a", tokens)
        decode = pair.d.submit(pair.decode("b", tokens, params))
        closed_generation = pair.d.submit(pair.decode("c", tokens, params))
        await closed_generation.aclose()
        (busy, _), (answer, _) = await asyncio.gather(finish(first), finish(decode))
        assert len(busy) == 49
        assert answer == expected(tokens, 8)


async def test_an_unread_prompt_is_freed_when_its_lease_ends() -> None:
    async with Pair(lease=0.05) as pair:
        await pair.prefill("a", prompt(50))
        await until(lambda: pair.p.stats().held_requests == 0)
        assert pair.counts_p.counts["expired"] == 1
        await pair.prefill("b", prompt(50))
    assert pair.counts_p.counts["hits"] == 48


async def test_a_prefill_preempted_under_its_reader_spoils_and_leaks_nothing() -> None:
    tokens = prompt(300)
    async with Pair(prefill_tokens=17, prefill_blocks=20) as pair:
        busy = pair.p.submit(Request("busy", prompt(10, 1), GREEDY(max_tokens=30)))
        await anext(busy)
        prefill = pair.p.submit(Request("a", tokens, GREEDY(max_tokens=1), RemoteDecode()))
        early = named(pair, tokens)
        decode = pair.d.submit(pair.decode("b", tokens, early))
        (_, _), (answer, _) = await asyncio.gather(finish(busy), finish(decode))
        assert answer == expected(tokens, 8)
        await finish(prefill)
        assert pair.counts_p.counts["preempted"] == 1
        await until(lambda: all_free(pair.p))


async def test_release_hold_frees_a_finished_prompt_at_once() -> None:
    async with Pair() as pair:
        pair.p.release_hold("unknown")
        await pair.prefill("a", prompt(50))
        pair.p.release_hold("a")
        assert all_free(pair.p)
    assert pair.counts_p.counts["expired"] == 0


async def test_wait_until_unheld_returns_after_the_last_read() -> None:
    async with Pair() as pair:
        legs = [
            (name, prompt(50, i), await pair.prefill(name, prompt(50, i)))
            for i, name in enumerate("ab")
        ]
        unheld = asyncio.create_task(pair.p.wait_until_unheld())
        for leg in legs:
            await asyncio.sleep(0)
            assert not unheld.done()
            await finish(pair.d.submit(pair.decode(*leg)))
        await unheld
        assert all_free(pair.p)


async def test_a_prefill_aborted_before_its_end_is_not_held() -> None:
    async with Pair(prefill_tokens=16) as pair:
        generation = pair.p.submit(Request("a", prompt(300), GREEDY(), RemoteDecode()))
        await until(lambda: pair.p.stats().running == 1)
        await generation.aclose()
        await until(lambda: all_free(pair.p))


async def test_a_held_id_cannot_be_used_again_and_stop_frees_it() -> None:
    async with running(kv_transfer=transfer(KvRole.BOTH, "X")) as engine:
        request = Request("a", prompt(20), GREEDY(), RemoteDecode())
        await finish(engine.submit(request))
        assert engine.stats().held_requests == 1
        engine.abort("a")
        assert engine.stats().held_requests == 1
        await engine.stop()


async def test_a_side_channel_port_in_use_is_a_config_error() -> None:
    async with running(kv_transfer=transfer(KvRole.PRODUCER, "X")) as engine:
        assert engine.side_channel is not None
        conflicting_transfer = replace(
            transfer(KvRole.PRODUCER, "Y"), side_channel_port=engine.side_channel[1]
        )
        with pytest.raises(ConfigError, match="cannot listen"):
            async with running(kv_transfer=conflicting_transfer):
                pass
