"""Hand-offs whose KV is read while it is computed: both legs are sent at once, in any order."""

import asyncio
import contextlib
from dataclasses import replace

import pytest

from tandem_contract.transfer_params import TransferParams
from tandem_engine.engine import Generation
from tandem_engine.types import LoadFailurePolicy, RemoteDecode, Request, RequestRejected

from .engines import GREEDY, all_free, expected, finish, prompt, until
from .test_handoff import Pair

LONG = prompt(300)


def prefill(pair: Pair, tokens: tuple[int, ...] = LONG, stream_id: str = "s") -> Generation:
    request = Request(f"p-{stream_id}", tokens, GREEDY(max_tokens=1), RemoteDecode(stream_id))
    return pair.p.submit(request)


def decode(pair: Pair, tokens: tuple[int, ...] = LONG, engine_id: str = "P") -> Generation:
    assert pair.p.side_channel is not None
    params = TransferParams(engine_id, "s", *pair.p.side_channel, (), is_stream=True)
    return pair.d.submit(pair.decode("d", tokens, params))


async def pulling(pair: Pair) -> None:
    """Wait until the decode engine's read has reached the prefill engine."""
    await until(lambda: pair.d.stats().waiting_for_kv == 1)


@pytest.mark.parametrize("decode_first", [False, True])
@pytest.mark.parametrize("step_tokens", [16, 2048])
async def test_a_stream_answers_as_a_single_engine_does(
    decode_first: bool, step_tokens: int
) -> None:
    async with Pair(prefill_tokens=step_tokens) as pair:
        if decode_first:
            reader, writer = decode(pair), prefill(pair)
        else:
            writer, reader = prefill(pair), decode(pair)
        answer, last = await finish(reader)
        assert (answer, last.finish_reason) == (expected(LONG, 8), "length")
        await finish(writer)
        await until(lambda: all_free(pair.p))
    assert pair.counts_d.counts["pull_failures"] == pair.counts_p.counts["expired"] == 0
    assert pair.counts_d.counts["external"] == len(LONG)


async def test_the_first_layers_arrive_while_the_rest_of_the_prompt_is_computed() -> None:
    async with Pair(prefill_tokens=16) as pair:
        writer, reader = prefill(pair), decode(pair)
        await finish(reader)
        # Read to its end before the prefill's own answer was taken: nothing waited for that.
        await until(lambda: all_free(pair.p))
        await finish(writer)


@pytest.mark.parametrize("policy", list(LoadFailurePolicy))
async def test_kv_of_another_prompt_is_refused(policy: LoadFailurePolicy) -> None:
    async with Pair(policy=policy) as pair:
        reader = decode(pair)
        await pulling(pair)
        writer = prefill(pair, prompt(300, seed=1))
        answer, last = await finish(reader)
        if policy is LoadFailurePolicy.RECOMPUTE:
            assert answer == expected(LONG, 8)
        else:
            assert (answer, last.finish_reason) == ([], "error")
            assert "prompt_hash differs" in (last.error or "")
        await finish(writer)
        await until(lambda: all_free(pair.p))
    assert pair.counts_d.counts["pull_failures"] == 1


async def test_a_restarted_prefill_engine_is_refused() -> None:
    async with Pair() as pair:
        answer, _ = await finish(decode(pair, engine_id="before the restart"))
    assert answer == expected(LONG, 8)
    assert pair.counts_d.counts["pull_failures"] == 1


@pytest.mark.parametrize("wait_for_read", [False, True])
async def test_an_aborted_prefill_is_computed_by_the_decode_engine(wait_for_read: bool) -> None:
    async with Pair(prefill_tokens=16) as pair:
        reader, writer = decode(pair), prefill(pair)
        if wait_for_read:
            await pulling(pair)
            await until(lambda: pair.p.stats().running == 1)
        pair.p.abort("p-s")
        await finish(writer)
        if not wait_for_read:
            # Nothing will open the stream again: end the wait that its reader would sit out.
            pair.d.abort("d")
        answer, _ = await finish(reader)
        if wait_for_read:
            assert answer == expected(LONG, 8)
        await until(lambda: all_free(pair.p))


@pytest.mark.parametrize("prefill_runs", [False, True])
async def test_an_aborted_decode_frees_both_engines(prefill_runs: bool) -> None:
    async with Pair(prefill_tokens=16) as pair:
        reader = decode(pair)
        writer = prefill(pair) if prefill_runs else None
        await pulling(pair)
        pair.d.abort("d")
        await finish(reader)
        await until(lambda: all_free(pair.d))
        if writer is not None:
            await finish(writer)
            await until(lambda: all_free(pair.p))


async def test_a_preempted_prefill_is_not_mixed_up() -> None:
    """Two prompts that do not fit together: one loses its blocks in the middle of its read."""
    first, second = prompt(150), prompt(150, seed=1)
    async with Pair(prefill_blocks=14, prefill_tokens=16) as pair:
        reader = decode(pair, first)
        writers = [prefill(pair, first), prefill(pair, second, "t")]
        answer, _ = await finish(reader)
        assert answer == expected(first, 8)
        assert pair.p.side_channel is not None
        params = TransferParams("P", "t", *pair.p.side_channel, (), is_stream=True)
        answer, _ = await finish(pair.d.submit(pair.decode("e", second, params)))
        assert answer == expected(second, 8)
        for writer in writers:
            await finish(writer)
        await until(lambda: all_free(pair.p))


async def test_a_release_before_the_end_of_the_prefill_frees_its_kv() -> None:
    async with Pair(prefill_tokens=16) as pair:
        writer = prefill(pair)
        assert pair.p.side_channel is not None
        params = TransferParams("P", "s", *pair.p.side_channel, (), is_stream=True)
        await pair.d.release_remote_hold(params)
        await finish(writer)
        await until(lambda: all_free(pair.p))


async def test_two_prefills_may_not_have_one_stream() -> None:
    async with Pair(prefill_tokens=16) as pair:
        writer = prefill(pair)
        with pytest.raises(RequestRejected, match="stream of another request"):
            pair.p.submit(Request("other", LONG, GREEDY(max_tokens=1), RemoteDecode("s")))
        await finish(decode(pair))
        await finish(writer)


async def test_an_expired_stream_id_can_be_used_again() -> None:
    async with Pair(lease=0.05) as pair:
        for _ in range(2):
            await finish(prefill(pair))
            await until(lambda: all_free(pair.p))
        writer = prefill(pair)
        with contextlib.suppress(asyncio.CancelledError):
            await finish(decode(pair))
        await finish(writer)
    assert pair.counts_p.counts["expired"] >= 2


async def test_a_queued_reader_keeps_the_kv_of_its_stream() -> None:
    """The decode engine has no block free: the lease of the stream must not end meanwhile."""
    async with Pair(lease=2.0, decode_blocks=21) as pair:
        blocker = pair.d.submit(replace(pair.decode("b", prompt(200, seed=2), None), kv=None))  # type: ignore[arg-type]  # computed there
        first = await anext(blocker)
        reader, writer = decode(pair), prefill(pair)
        await finish(writer)
        later, _ = await finish(blocker)
        assert [*first.token_ids, *later] == expected(prompt(200, seed=2), 8)
        answer, _ = await finish(reader)
        assert answer == expected(LONG, 8)
    assert pair.counts_p.counts["expired"] == 0
