"""How requests that wait share pods while pods, settings and other replicas change."""

import asyncio
from collections.abc import Sequence
from time import time
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem_contract.config import Backend
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.flow.elsewhere import Group, Share, WaitingElsewhere, Went
from tandem_epp.flow.flows import LEAD
from tandem_epp.flow.saturation import EMPTY_PATIENCE
from tandem_epp.flow.settings import flow_settings
from tandem_epp.placement.placement import Placement

from ..placement.test_picker import LONG
from .test_control import ON, FlowSetup, Replicas

GROUP = Group("m", 0, is_split=False)


async def start(
    setup: FlowSetup, tenants: str, prompt: str = LONG
) -> list[asyncio.Task[Placement]]:
    """A request of each of `tenants`, which have names of one letter."""
    return [await setup.start(prompt, x_llm_d_inference_fairness_id=name) for name in tenants]


async def check_order(
    running: Placement, waiting: Sequence[asyncio.Task[Placement]], order: Sequence[int]
) -> None:
    """Those that wait go in this order, one when the last one ends."""
    for expected in order:
        running.end(time())
        async with asyncio.timeout(5):
            running = await waiting[expected]
    running.end(time())


async def setup_whose_pod_leaves() -> tuple[FlowSetup, Placement, list[asyncio.Task[Placement]]]:
    """Two pods of which one leaves while requests of `a` wait; and what runs on the other."""
    setup = FlowSetup(u="unified", v="unified")
    placed = [await setup.send(), await setup.send()]
    waiting = await start(setup, "aa")
    left = next(each for each in placed if each.decode.name == "v")
    stays = next(each for each in placed if each is not left)
    setup.fleet.apply([DiscoveredBackend(setup["u"].backend)])
    return setup, stays, waiting


async def test_tenants_share_pods_whose_group_changed() -> None:
    setup, running, waiting = await setup_whose_pod_leaves()
    waiting += await start(setup, "bb")
    await check_order(running, waiting, (0, 2, 1, 3))


async def test_what_goes_elsewhere_is_charged_also_after_pods_changed() -> None:
    setup = FlowSetup(u="unified", v="unified")
    placed = [await setup.send(), await setup.send()]
    waiting = await start(setup, "aabb")
    setup.fleet.apply([DiscoveredBackend(setup["u"].backend)])
    for _ in range(2):
        setup.flow.elsewhere.learn("other", GROUP, Share(), Went("a", 1.0))
    running = next(each for each in placed if each.decode.name == "u")
    await check_order(running, waiting, (2, 3, 0, 1))


async def test_models_wait_apart_once_their_pods_differ() -> None:
    setup = FlowSetup()
    both = Backend(name="v", url="http://10.0.0.9:8000", models=("m", "n"))
    setup.fleet.apply([DiscoveredBackend(both)])
    for pod in setup.fleet:
        pod.estimates.slots.limit, pod.scraped_at = 1, float("inf")
    await setup.send()
    first = await setup.start()
    second = asyncio.create_task(setup.send(model="n"))
    await asyncio.sleep(0)
    only = Backend(name="w", url="http://10.0.0.8:8000", models=("n",))
    setup.fleet.apply(map(DiscoveredBackend, (both, only)))
    assert (await second).decode.name == "w"
    assert (setup.held, first.done()) == (1, False)
    first.cancel()
    await asyncio.wait([first])
    assert (setup.held, setup.held_bytes) == (0, 0)


async def test_shares_are_counted_by_the_settings_of_now() -> None:
    tokens = replace(ON, fairness="tokens")
    setup = FlowSetup(tokens)
    running = await setup.send()
    long = await start(setup, "a", LONG * 20)
    waiting = await start(setup, "aabb")
    running.end(time())
    running = await long[0]
    # By tokens `b` would go twice before `a`.
    setup.flow.settings = flow_settings(ON)
    await check_order(running, waiting, (0, 2, 1, 3))


@pytest.mark.usefixtures("patience")
async def test_replicas_count_by_their_own_settings() -> None:
    """One of them already counts tokens."""
    replicas = Replicas()
    first, second = replicas.setups
    first.flow.settings = flow_settings(replace(ON, fairness="tokens"))
    running = await first.send()
    replicas.tell()
    here = await start(first, "a")
    there = await start(second, "aaab")
    replicas.tell()
    running.end(time())
    (await here[0]).end(time())
    replicas.tell()
    # One request of `a` has gone, not hundreds.
    running = await there[3]
    replicas.tell()
    await check_order(running, there, (0,))
    for task in there:
        task.cancel()


@pytest.mark.usefixtures("patience")
async def test_a_tenant_with_a_long_name_has_one_share_of_all_replicas() -> None:
    replicas = Replicas()
    first, second = replicas.setups
    replicas.runs = [await first.send()]
    replicas.tell()
    long = "a" * 300
    tenants = [(first, long)] * 24 + [(second, long)] * 12
    tenants += [(second, name) for name in "bcd" for _ in range(12)]
    waiting = [
        (name, await setup.start(x_llm_d_inference_fairness_id=name)) for setup, name in tenants
    ]
    replicas.tell()
    served = await replicas.served(36, waiting)
    assert served.count(long) <= 9 + LEAD
    for _, task in waiting:
        task.cancel()


def with_prompts_ahead(seconds: float) -> FlowSetup:
    """A pod that computes prompts for so long."""
    setup = FlowSetup()
    pod = setup["u"]
    pod.estimates.slots.limit = 9
    pod.estimates.queue.add(seconds, time())
    pod.estimates.changed()
    return setup


async def test_none_is_held_for_whom_no_other_one_goes_first() -> None:
    setup = with_prompts_ahead(EMPTY_PATIENCE / 2)
    assert (await start(setup, "a"))[0].done()
    setup = with_prompts_ahead(EMPTY_PATIENCE * 2)
    (waiting,) = await start(setup, "a")
    assert not waiting.done()
    waiting.cancel()


async def test_pods_are_kept_free_for_a_higher_priority_that_came() -> None:
    setup = with_prompts_ahead(EMPTY_PATIENCE / 2)
    important = await setup.start("hello", priority="1")
    assert important.done()
    (other,) = await start(setup, "a")
    assert not other.done()
    other.cancel()
    await asyncio.wait([other])
    assert (await setup.start("hello", priority="1")).done()


async def test_none_waits_in_an_engine_for_longer_than_it_may_wait_at_all() -> None:
    setup = with_prompts_ahead(EMPTY_PATIENCE / 2)
    ttl = f"{EMPTY_PATIENCE * 250:.0f}ms"
    waiting = await setup.start(x_llm_d_inference_ttl=ttl)
    assert not waiting.done()
    waiting.cancel()


class CountedPriority(int):
    """Counts how often it is compared."""

    compared: ClassVar[int] = 0

    def _count(self) -> None:
        CountedPriority.compared += 1

    def __ge__(self, other: int) -> bool:
        self._count()
        return int(self) >= other

    def __le__(self, other: int) -> bool:
        self._count()
        return int(self) <= other

    def __gt__(self, other: int) -> bool:
        self._count()
        return int(self) > other


async def test_an_admission_reads_no_group_of_other_models() -> None:
    setup = FlowSetup(replace(ON, max_requests=10_000))
    await setup.send()
    for number in range(500):
        other = Group(f"model {number}", CountedPriority(0), is_split=False)
        setup.flow.elsewhere.learn("other", other, Share(1, 10))
    CountedPriority.compared = 0
    waiting = await setup.start()
    assert setup.held == 1
    assert CountedPriority.compared < 50
    waiting.cancel()


NEWS = st.lists(
    st.tuples(
        st.sampled_from("xy"),
        st.builds(Group, st.sampled_from("mn"), st.integers(-1, 1), st.booleans()),
        st.builds(Share, st.integers(0, 3), st.integers(0, 9), st.floats(0.0, 9.0)),
        st.sampled_from((None, Went("t", 1.0))),
    ),
    max_size=30,
)


@given(
    NEWS, st.sampled_from("xyz"), st.builds(Group, st.just("m"), st.integers(-1, 1), st.just(False))
)
def test_sums_are_those_of_what_was_told(
    news: list[tuple[str, Group, Share, Went | None]], gone: str, group: Group
) -> None:
    elsewhere, told = WaitingElsewhere(), dict[tuple[str, Group], Share]()
    for peer, other, share, went in news:
        elsewhere.learn(peer, other, share, went)
        told[peer, other] = share
    elsewhere.forget(gone)
    told = {key: each for key, each in told.items() if key[0] != gone and each.requests}
    alike = {key: told[key] for key in told if key[1][::2] == group[::2]}
    assert elsewhere.is_empty == (not told)
    assert elsewhere.has(group) == bool(alike)
    assert elsewhere.latest_turn(group) == max(
        (each.turn for (_, other), each in alike.items() if other == group), default=0.0
    )
    for lowest, highest in ((None, None), (0, None), (0, 0), (None, -1)):
        counted = [
            each
            for (_, other), each in told.items()
            if (lowest is None or other.priority >= lowest)
            and (highest is None or other.priority <= highest)
        ]
        sums = sum(each.requests for each in counted), sum(each.size for each in counted)
        assert elsewhere.total(lowest, highest)[:2] == sums
