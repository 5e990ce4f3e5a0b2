import asyncio

import pytest

from tandem_engine.blocks import BlocksStored
from tandem_engine.config import EngineConfig
from tandem_engine.engine import Engine
from tandem_engine.types import ConfigError, RemoteDecode, Request, RequestRejected, SamplingParams
from tandem_engine.weights import ModelError

from .engines import GREEDY, Tally, expected, finish, prompt, running, tiny_model, until

pytestmark = pytest.mark.long


async def test_answers_as_the_dense_reference_does() -> None:
    async with running() as engine:
        tokens, last = await finish(engine.submit(Request("a", prompt(37), GREEDY(max_tokens=24))))
    assert tokens == expected(prompt(37), 24)
    assert (last.finish_reason, last.stop_token) == ("length", None)


@pytest.mark.parametrize("limit", ["max_num_batched_tokens", "long_prefill_token_threshold"])
async def test_batched_and_chunked_runs_answer_the_same(limit: str) -> None:
    prompts = [prompt(length, seed) for seed, length in enumerate((1, 2, 15, 16, 17, 33, 64, 90))]
    async with running(**{limit: 24}) as engine:
        answers = await asyncio.gather(
            *(
                finish(engine.submit(Request(str(i), tokens, GREEDY(max_tokens=12))))
                for i, tokens in enumerate(prompts)
            )
        )
    assert [tokens for tokens, _ in answers] == [expected(tokens, 12) for tokens in prompts]


async def test_decodes_go_on_while_a_long_prompt_is_prefilled() -> None:
    async with running(max_num_batched_tokens=16, num_blocks=128) as engine:
        short = engine.submit(Request("short", prompt(8), GREEDY(max_tokens=60)))
        await anext(short)
        long = engine.submit(Request("long", prompt(400, 1), GREEDY(max_tokens=1)))
        order: list[str] = []

        async def note(name: str, generation: object) -> None:
            async for _ in generation:  # type: ignore[attr-defined]  # a Generation
                order.append(name)

        await asyncio.gather(note("short", short), note("long", long))
    assert order.index("long") >= 20


async def test_a_cached_prefix_is_not_computed_again_and_changes_nothing() -> None:
    tally = Tally()
    first, second = prompt(70), prompt(70)[:50] + prompt(30, 1)
    async with running(tally) as engine:
        await finish(engine.submit(Request("a", first, GREEDY(max_tokens=8))))
        tokens, _ = await finish(engine.submit(Request("b", second, GREEDY(max_tokens=8))))
        repeated = engine.submit(Request("c", first, GREEDY(max_tokens=8)))
        delta = await anext(repeated)
        assert delta.timing is not None
        assert (delta.timing.cached, delta.timing.computed) == (64, 6)
        await finish(repeated)
    assert tokens == expected(second, 8)
    assert tally.counts["hits"] == 48 + 64
    assert tally.counts["computed"] == 70 + 32 + 6


async def test_a_prompt_cached_to_its_last_token_still_answers() -> None:
    async with running() as engine:
        for name in ("a", "b"):
            tokens, _ = await finish(engine.submit(Request(name, prompt(48), GREEDY(max_tokens=6))))
            assert tokens == expected(prompt(48), 6)


async def test_preempted_sequences_answer_the_same() -> None:
    tally = Tally()
    prompts = [prompt(30, seed) for seed in range(4)]
    async with running(tally, num_blocks=13) as engine:
        answers = await asyncio.gather(
            *(
                finish(engine.submit(Request(str(i), tokens, GREEDY(max_tokens=40))))
                for i, tokens in enumerate(prompts)
            )
        )
    assert [tokens for tokens, _ in answers] == [expected(tokens, 40) for tokens in prompts]
    assert tally.counts["preempted"] > 0
    assert tally.counts["generated"] == 160


async def test_a_seed_gives_one_answer_whatever_else_runs() -> None:
    sampling = SamplingParams(max_tokens=16, temperature=1.3, top_p=0.9, top_k=40, seed=7)
    async with running() as engine:
        alone, _ = await finish(engine.submit(Request("a", prompt(20), sampling)))
        others = [engine.submit(Request(f"o{i}", prompt(25, i), sampling)) for i in range(3)]
        among, _ = await finish(engine.submit(Request("b", prompt(20), sampling)))
        for other in others:
            await finish(other)
        other_seed = SamplingParams(max_tokens=16, temperature=1.3, seed=8)
        differs, _ = await finish(engine.submit(Request("c", prompt(20), other_seed)))
    assert alone == among != differs


async def test_stop_tokens_end_it_but_not_before_min_tokens() -> None:
    answer = expected(prompt(10), 12)
    stop = answer[3]
    sampling = GREEDY(max_tokens=12, stop_token_ids=(stop,))
    late = GREEDY(max_tokens=12, stop_token_ids=(stop,), min_tokens=6)
    async with running() as engine:
        tokens, last = await finish(engine.submit(Request("a", prompt(10), sampling)))
        longer, _ = await finish(engine.submit(Request("b", prompt(10), late)))
    assert tokens == answer[: answer.index(stop) + 1]
    assert (last.finish_reason, last.stop_token) == ("stop", stop)
    assert stop not in longer[:6]
    assert len(longer) > 6


async def test_logprobs_come_with_each_token() -> None:
    sampling = GREEDY(max_tokens=3, logprobs=4)
    async with running() as engine:
        deltas = [d async for d in engine.submit(Request("a", prompt(10), sampling))]
    for delta in deltas:
        (report,) = delta.logprobs
        assert report.top[0] == (delta.token_ids[0], report.chosen)
        assert len(report.top) == 4
        assert report.chosen <= 0


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (Request("x", ()), "the prompt is empty"),
        (Request("x", (1, 512)), "vocabulary of 512"),
        (Request("x", (1, -1)), "vocabulary of 512"),
        (Request("x", (5,) * 90, GREEDY(max_tokens=11)), "more than the 100 tokens"),
        (Request("x", (5,) * 60, GREEDY(max_tokens=5)), "need 5 KV blocks, this engine has 4"),
        (Request("x", (5,), GREEDY(max_tokens=0)), "at least 1"),
        (Request("busy", (5,)), "in use"),
    ],
)
async def test_what_can_never_run_is_rejected(request_: Request, message: str) -> None:
    async with running(num_blocks=4, max_model_len=100) as engine:
        busy = engine.submit(Request("busy", (5,), GREEDY(max_tokens=2)))
        with pytest.raises(RequestRejected, match=message):
            engine.submit(request_)
        await finish(busy)


async def test_abort_frees_at_every_stage() -> None:
    async with running(max_num_batched_tokens=16, max_num_seqs=1) as engine:
        queued = engine.submit(Request("new", prompt(40), GREEDY(max_tokens=50)))
        engine.abort("new")
        assert (await finish(queued))[1].finish_reason == "abort"
        long = engine.submit(Request("prefilling", prompt(300), GREEDY(max_tokens=50)))
        waiting = engine.submit(Request("waiting", prompt(40), GREEDY(max_tokens=50)))
        await until(lambda: engine.stats().running == 1)
        engine.abort("waiting")
        assert engine.stats().waiting == 0
        await long.aclose()
        assert [d async for d in long] == []
        decoding = engine.submit(Request("decoding", prompt(10), GREEDY(max_tokens=200)))
        await anext(decoding)
        engine.abort("decoding")
        engine.abort("decoding")
        engine.abort("never seen")
        assert (await finish(decoding))[1].finish_reason == "abort"
        assert (await finish(waiting))[1].finish_reason == "abort"


async def test_stop_ends_what_runs() -> None:
    async with running() as engine:
        generation = engine.submit(Request("a", prompt(10), GREEDY(max_tokens=500)))
        await anext(generation)
        await engine.stop()
        assert (await finish(generation))[1].finish_reason == "abort"
        refused = engine.submit(Request("b", prompt(10)))
        assert (await finish(refused))[1].error == "the engine is shutting down"


async def test_a_failing_step_ends_every_request_and_shows_in_health(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as engine:
        first = engine.submit(Request("a", prompt(10), GREEDY(max_tokens=500)))
        await anext(first)
        engine._runner.cache.layers.clear()
        second = engine.submit(Request("b", prompt(10), GREEDY(max_tokens=5)))
        assert {(await finish(g))[1].finish_reason for g in (first, second)} == {"error"}
        assert not engine.healthy
        assert (await finish(engine.submit(Request("c", prompt(3)))))[1].finish_reason == "error"
    assert "Traceback" in caplog.text


async def test_without_a_role_a_hand_off_is_served_whole() -> None:
    async with running() as engine:
        request = Request("a", prompt(10), GREEDY(max_tokens=4), RemoteDecode())
        tokens, last = await finish(engine.submit(request))
    assert tokens == expected(prompt(10), 4)
    assert last.kv_transfer_params is None


async def test_reset_forgets_prefixes_unless_blocks_are_in_use() -> None:
    tally = Tally()
    async with running(tally) as engine:
        generation = engine.submit(Request("a", prompt(40), GREEDY(max_tokens=20)))
        await anext(generation)
        assert not engine.reset_prefix_cache()
        await finish(generation)
        assert engine.reset_prefix_cache()
        await finish(engine.submit(Request("b", prompt(40), GREEDY(max_tokens=2))))
    assert tally.counts["hits"] == 0
    assert isinstance(tally.events[0], BlocksStored)


async def test_start_says_what_is_wrong() -> None:
    with pytest.raises(ModelError, match="no such directory"):
        await Engine(EngineConfig(model=tiny_model() / "absent"), Tally()).start()
    too_long = EngineConfig(model=tiny_model(), max_model_len=10**6, device="cpu")
    with pytest.raises(ConfigError, match="goes up to 8192 tokens"):
        await Engine(too_long, Tally()).start()
