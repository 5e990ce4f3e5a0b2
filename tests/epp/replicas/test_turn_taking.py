"""Which decisions wait for a turn, and how."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack

import pytest
from prometheus_client import CollectorRegistry

from tandem_epp.replicas.peers.frames import Event, TurnAsked, TurnGranted
from tandem_epp.replicas.peers.turns import Turns
from tandem_epp.replicas.turn_taking import UNSEEN_SECONDS, Crowding, TurnMetrics, TurnTaker
from tests.epp.placement.test_picker import PickerSetup
from tests.epp.replicas.peers.replicas import mesh

NOW = 1000.0


class FakePeers:
    """Other replicas, which answer when `answer` is called."""

    instance = "a"

    def __init__(self, *connected: str) -> None:
        self.connected = set(connected)
        self.asked: list[tuple[str, int]] = []

    def tell(self, peer: str, event: TurnAsked | TurnGranted) -> None:
        self.asked.append((peer, event.number))

    def answer(self, turns: Turns) -> None:
        for peer, number in self.asked:
            turns.receive(peer, TurnGranted(number))
        self.asked.clear()


def taker(peers: FakePeers) -> tuple[TurnTaker, Turns, CollectorRegistry]:
    registry = CollectorRegistry()
    setup = PickerSetup(d1="decode", d2="decode")
    setup.fleet.figures.share()
    turns = Turns(peers, lambda seconds, action: None)
    return TurnTaker(setup.fleet, peers, turns, TurnMetrics(registry)), turns, registry


def test_a_burst_counts_what_came_before_in_it() -> None:
    crowding = Crowding()
    assert [crowding.count_decision(10.0 + i * 1e-4) for i in range(4)] == [0.0, 1.0, 2.0, 3.0]
    assert crowding.count_decision(20.0) < 1.0


def test_the_first_request_of_a_burst_is_taken_for_an_average_one() -> None:
    crowding = Crowding()
    for burst in range(200):
        for i in range(10):
            crowding.count_decision(burst * 3.0 + i * UNSEEN_SECONDS / 20)
    assert crowding.count_decision(1000.0) == pytest.approx(4.5, abs=0.5)


@pytest.mark.parametrize(
    ("peers", "seconds_apart", "expected"),
    [((), 1e-4, False), (("b",), 1e-4, True), (("b",), 1.0, False)],
    ids=["alone", "in a burst", "far apart"],
)
def test_decisions_take_turns_in_bursts_among_replicas(
    peers: tuple[str, ...], seconds_apart: float, expected: bool
) -> None:
    turn_taker, _, _ = taker(FakePeers(*peers))
    for i in range(3):
        needed = turn_taker.needs_turn(NOW + i * seconds_apart)
    assert needed is expected


def test_pods_whose_prefills_take_no_time_need_no_turns() -> None:
    turn_taker, _, _ = taker(FakePeers("b"))
    turn_taker._fleet.figures.mean_prefill = 1e-4
    assert not any(turn_taker.needs_turn(NOW + i * 1e-4) for i in range(10))


async def until_waiting(peers: FakePeers, count: int) -> None:
    """Let the tasks run until `count` peers are asked."""
    while len(peers.asked) < count:
        await asyncio.sleep(0)


async def test_a_decision_waits_for_the_others_grants() -> None:
    peers = FakePeers("b", "c")
    turn_taker, turns, registry = taker(peers)
    order = []

    async def decide(name: str) -> None:
        async with turn_taker.turn():
            order.append(name)

    # The first one meets nothing: the rest of the burst waits.
    await decide("first")
    tasks = [asyncio.create_task(decide(name)) for name in ("second", "third")]
    await until_waiting(peers, 2)
    assert order == ["first"]
    peers.answer(turns)
    await asyncio.gather(*tasks[:1])
    await until_waiting(peers, 0)
    peers.answer(turns)
    await asyncio.gather(*tasks)
    assert order == ["first", "second", "third"]
    assert registry.get_sample_value("tandem_epp_turn_wait_seconds_count") == 2


async def test_a_decision_that_is_cancelled_lets_the_others_go_on() -> None:
    peers = FakePeers("b")
    turn_taker, turns, _ = taker(peers)
    order = []

    async def decide(name: str) -> None:
        async with turn_taker.turn():
            order.append(name)

    await decide("first")
    gone = asyncio.create_task(decide("gone"))
    await until_waiting(peers, 1)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    other = asyncio.create_task(decide("other"))
    await asyncio.sleep(0)
    peers.answer(turns)
    await other
    assert order == ["first", "other"]


@pytest.mark.component
async def test_three_replicas_over_sockets_decide_one_at_a_time() -> None:
    deciding: list[str] = []
    decided: list[str] = []

    def later(seconds: float, action: Callable[[], None]) -> object:
        return asyncio.get_running_loop().call_later(seconds * 100, action)

    async with AsyncExitStack() as stack:
        replicas = await stack.enter_async_context(mesh(3))
        all_turns = []
        for replica in replicas:
            turns = Turns(replica.channel, later)
            all_turns.append(turns)

            def apply(peer: str, event: Event, turns: Turns = turns) -> None:
                if isinstance(event, TurnAsked | TurnGranted):
                    turns.receive(peer, event)

            replica.notes.apply = apply  # type: ignore[method-assign]

        async def decide(name: str, turns: Turns) -> None:
            granted = asyncio.Event()
            turns.enter(granted.set)
            await granted.wait()
            deciding.append(name)
            # Others run meanwhile.
            await asyncio.sleep(0)
            assert set(deciding) == {name}
            deciding.remove(name)
            decided.append(name)
            turns.leave(granted.set)

        async with asyncio.timeout(30):
            await asyncio.gather(
                *(decide(str(i), turns) for _ in range(30) for i, turns in enumerate(all_turns))
            )
    assert sorted(decided) == sorted(["0", "1", "2"] * 30)
