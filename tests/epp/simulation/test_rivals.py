"""Rebuilt routers of other projects follow the rules that their modules state."""

from collections.abc import Callable

import pytest

from tandem_planner.simulation.block_pool import BLOCK
from tandem_planner.simulation.engine import Engine
from tandem_planner.simulation.loop import simulate
from tandem_planner.simulation.measures import Result
from tandem_planner.simulation.routers import Policy, Pools, Router
from tandem_planner.simulation.work import Work

from .dynamo_policy import DynamoCost, DynamoSettings
from .llmd_policy import LlmdDefault, LlmdSettings
from .placed_prefixes import PlacedPrefixes
from .pods import CACHE_TOKENS, SPEED, engines
from .policies import LeastTokens
from .real_picker import PickerSettings, RealPicker
from .sglang_policy import SglangCacheAware
from .workload import conversations

# The simulation gives the picker an index of its own, derived from PrefixTree.
pytestmark = pytest.mark.interpreted
POOLS = Pools(prefills=(0, 1), decodes=(2, 3))


def pods(count: int = 3) -> list[Engine]:
    return [Engine(SPEED, cache_tokens=CACHE_TOKENS, seed=i) for i in range(count)]


def prompt(index: int, blocks: range, own: int = 0) -> Work:
    """A prompt of whole blocks, the last `own` of them its own."""
    ids = [*blocks, *(10_000 * (index + 1) + i for i in range(own))]
    return Work(index, 0.0, BLOCK * len(ids), 10, ids)


def cache(pod: Engine, work: Work) -> None:
    """`pod` has the prompt, and has nothing to do."""
    pod.pool.use(work.blocks)
    pod.pool.release(work.blocks)


def test_placed_prefixes_are_forgotten_from_their_end_the_least_recent_first() -> None:
    prefixes = PlacedPrefixes(2, capacity=6)
    first, second = prompt(0, range(4)), prompt(1, range(4, 8))
    prefixes.add(0, first.blocks, now=1.0)
    prefixes.add(0, second.blocks, now=2.0)
    assert prefixes.tokens(0, second) == 4 * BLOCK
    assert prefixes.tokens(0, first) == 2 * BLOCK
    assert prefixes.tokens(0, first, since=1.5) == 0
    assert prefixes.tokens(1, first) == 0


def test_least_tokens_counts_prompts_until_their_end() -> None:
    policy = LeastTokens(pods(2), seed=1)
    long, short = prompt(0, range(9)), prompt(1, range(10, 12))
    first = policy.choose(long, 0.0).decode
    assert policy.choose(short, 0.0).decode != first
    assert policy.choose(prompt(2, range(20, 22)), 0.0).decode != first
    policy.on_end(long, 1.0)
    assert policy.choose(prompt(3, range(30, 31)), 1.0).decode == first


def test_llm_d_stays_with_a_warm_pod_up_to_the_penalty() -> None:
    policy = LlmdDefault(pods(), 1, settings=LlmdSettings(penalty=1.0, throughput=10 * BLOCK))
    warm = policy.choose(prompt(0, range(10)), 0.0).decode
    # Ten blocks in flight are one second, which is not more than the penalty.
    assert policy.choose(prompt(1, range(10), own=2), 0.0).decode == warm
    assert policy.choose(prompt(2, range(10), own=1), 0.0).decode != warm
    assert policy.choose(prompt(3, range(9), own=3), 0.0).decode != warm, "less than 0.8 of it"


def test_llm_d_counts_uncached_tokens_until_the_first_token() -> None:
    policy = LlmdDefault(pods(2), 1)
    work = prompt(0, range(4))
    pod = policy.choose(work, 0.0).decode
    assert policy.choose(prompt(1, range(10, 12)), 0.0).decode != pod
    policy.on_response(work, 200, 1.0)
    assert policy.choose(prompt(2, range(20, 22)), 1.0).decode == pod


def test_llm_d_splits_every_request_or_those_with_enough_uncached_tokens() -> None:
    always = LlmdDefault(pods(4), 1, pools=POOLS)
    first = always.choose(prompt(0, range(8)), 0.0)
    assert first.prefill in POOLS.prefills
    second = always.choose(prompt(1, range(8), own=1), 0.0)
    assert second.prefill == first.prefill, "it caches most of the prompt"
    assert second.decode not in (first.decode, *POOLS.prefills), "the fewest requests"
    some = LlmdDefault(pods(4), 1, settings=LlmdSettings(min_uncached=512), pools=POOLS)
    work = prompt(0, range(8))
    pod = some.choose(work, 0.0).decode
    for other in range(1, 4):
        some.choose(prompt(other, range(100 * other, 100 * other + 8)), 0.0)
    some.on_end(work, 1.0)
    again = Work(9, 1.0, 8 * BLOCK - 1, 10, work.blocks)
    assert some.choose(again, 1.0) == (pod, None)


GUIDE = """
plugins:
- type: token-load-scorer
- type: prefix-cache-affinity-filter
  parameters: {maxTTFTPenaltyMs: 18000, peakPrefillThroughput: 9577}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: prefix-cache-affinity-filter}, {pluginRef: token-load-scorer}]
"""


def test_the_epps_plugins_of_llm_ds_guide_route_like_the_rebuilt_llm_d() -> None:
    requests = conversations(300, rate=8.0, seed=7)

    def run(make: Callable[[list[Engine]], Router]) -> Result:
        fleet = engines(4, seed=3)
        return simulate(requests, fleet, make(fleet))

    rebuilt = run(lambda fleet: LlmdDefault(fleet, 3))
    plugins = run(lambda fleet: RealPicker(fleet, 3, PickerSettings(GUIDE)))
    assert plugins.ttft_mean() == pytest.approx(rebuilt.ttft_mean(), rel=0.1)
    assert plugins.hit_ratio() == pytest.approx(rebuilt.hit_ratio(), abs=0.02)


def test_dynamo_adds_prefill_and_decode_load_in_tokens() -> None:
    engines_ = pods(2)
    policy = DynamoCost(engines_, 1)
    warm = prompt(0, range(10))
    cache(engines_[0], warm)
    # Pod 0: nothing to compute and ten blocks active; pod 1: ten of each.
    assert policy.choose(warm, 0.0).decode == 0
    # Shared blocks are active once: pod 0 costs 0 + 10, pod 1 still 10 + 10.
    assert policy.choose(prompt(1, range(10)), 0.0).decode == 0
    # A prompt of nine other blocks: pod 0 costs 9 + 19, pod 1 costs 9 + 9.
    assert policy.choose(prompt(2, range(50, 59)), 0.0).decode == 1


def test_dynamos_credit_decays_with_prefills_in_flight() -> None:
    def chosen(decay: float) -> int:
        engines_ = pods(2)
        policy = DynamoCost(engines_, 1, settings=DynamoSettings(decay=decay))
        cache(engines_[0], prompt(0, range(10)))
        work = prompt(1, range(20, 24))
        work.only = 0
        policy.choose(work, 0.0)
        return policy.choose(prompt(2, range(10)), 0.0).decode

    # Pod 0 costs 4 to compute and 14 active; pod 1 costs 10 and 10.
    assert chosen(0.0) == 0
    assert chosen(2.0) == 1


def test_dynamo_may_count_a_placed_prompt_as_cached_for_some_seconds() -> None:
    policy = DynamoCost(pods(2), 1, settings=DynamoSettings(predicted=5.0))
    work = prompt(0, range(10))
    pod = policy.choose(work, 0.0).decode
    policy.on_response(work, 200, 0.1)
    policy.on_end(work, 0.1)
    later = prompt(1, range(10), own=1)
    assert policy.choose(later, 4.0).decode == pod


def test_dynamo_computes_short_rests_on_a_warm_decode_worker() -> None:
    engines_ = pods(4)
    warm = prompt(0, range(10))
    cache(engines_[3], warm)
    conditional = DynamoCost(engines_, 1, settings=DynamoSettings(is_conditional=True), pools=POOLS)
    assert conditional.choose(prompt(1, range(10), own=3), 0.0) == (3, None)
    assert conditional.choose(prompt(2, range(10), own=4), 0.0).prefill is not None, "2,048 tokens"
    assert conditional.choose(prompt(3, range(1), own=3), 0.0).prefill is not None, "0.75 of it"
    always = DynamoCost(engines_, 1, pools=POOLS)
    assert always.choose(warm, 0.0).prefill is not None


def test_sglang_follows_the_longest_match_while_loads_are_balanced() -> None:
    policy = SglangCacheAware(pods(2), 1)
    pod = policy.choose(prompt(0, range(10)), 0.0).decode
    chosen = [policy.choose(prompt(i, range(10), own=1), 0.0).decode for i in range(1, 65)]
    assert set(chosen) == {pod}
    # 65 requests more than the other has.
    assert policy.choose(prompt(65, range(10), own=1), 0.0).decode != pod


def test_sglang_takes_the_smallest_load_for_a_short_match() -> None:
    policy = SglangCacheAware(pods(2), 1)
    pod = policy.choose(prompt(0, range(3)), 0.0).decode
    assert policy.choose(prompt(1, range(3), own=8), 0.0).decode != pod
    assert policy.choose(prompt(2, range(3), own=1), 0.0).decode in (0, 1)


@pytest.mark.parametrize(
    "make",
    [
        LlmdDefault,
        DynamoCost,
        lambda pods, seed, pools: DynamoCost(
            pods, seed, settings=DynamoSettings(predicted=5.0, is_conditional=True), pools=pools
        ),
        SglangCacheAware,
    ],
)
@pytest.mark.parametrize("pools", [None, POOLS])
def test_nothing_is_in_flight_after_a_run(make: Callable[..., Policy], pools: Pools | None) -> None:
    fleet = engines(4, seed=1, decodes=POOLS.decodes)
    policy = make(fleet, 1, pools=pools)
    requests = conversations(60, rate=4.0, seed=2)
    served = simulate(requests, fleet, policy).served
    assert all(each.ended is not None for each in served)
    for name in ("_tokens", "_requests", "_prefilling", "_prompts", "_loads"):
        assert not any(vars(policy).get(name, ())), name
