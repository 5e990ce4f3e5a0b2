"""Replicas that decide one after the other."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from tandem_epp.replicas.peers.frames import TurnAsked, TurnGranted
from tandem_epp.replicas.peers.turns import FIRST_PAUSE, LONGEST_WAIT, Turns, Waiter

Told = TurnAsked | TurnGranted | int
"""An int stands for a placement: the number of the decision."""


@dataclass
class Replica:
    """One replica, and what it has heard of others' decisions."""

    network: "Network"
    instance: str
    connected: set[str]
    heard: set[int] = field(default_factory=set)
    deciding: list[Waiter] = field(default_factory=list)
    entered: int = 0
    decided: int = 0
    expired: int = 0
    alarms: list[tuple[float, Callable[[], None]]] = field(default_factory=list)
    """Seconds until each is due."""

    def __post_init__(self) -> None:
        self.turns = Turns(self, self._later)
        self.turns.on_expired = self._count_expired

    def tell(self, peer: str, event: Told) -> None:
        self.network.channels[self.instance, peer].append(event)

    def enter(self) -> None:
        self.entered += 1

        def begin() -> None:
            self.deciding.append(begin)

        self.turns.enter(begin)

    def decide(self) -> None:
        """Decide on a request whose turn it is: all others hear of it."""
        self.network.decisions += 1
        self.heard.add(self.network.decisions)
        for peer in self.connected:
            self.tell(peer, self.network.decisions)
        self.decided += 1
        self.turns.leave(self.deciding.pop(0))

    def _later(self, seconds: float, action: Callable[[], None]) -> None:
        self.alarms.append((seconds, action))

    def pass_time(self, seconds: float) -> None:
        """Let the alarms run that are due by then."""
        due = [action for after, action in self.alarms if after <= seconds]
        self.alarms = [
            (after - seconds, action) for after, action in self.alarms if after > seconds
        ]
        for action in due:
            action()

    @property
    def pauses(self) -> list[str]:
        """The peers that did not grant in time."""
        return list(self.turns._pauses)

    def _count_expired(self) -> None:
        self.expired += 1


class Network:
    """Replicas, and channels between them that keep their order."""

    def __init__(self, count: int) -> None:
        names = [chr(ord("a") + i) for i in range(count)]
        self.channels: dict[tuple[str, str], deque[Told]] = {
            (a, b): deque() for a in names for b in names
        }
        self.decisions = 0
        self.replicas = {name: Replica(self, name, set(names) - {name}) for name in names}

    def deliver(self, channel: tuple[str, str]) -> None:
        """The next event of a channel arrives."""
        source, target = channel
        event = self.channels[channel].popleft()
        receiver = self.replicas[target]
        if isinstance(event, int):
            receiver.heard.add(event)
        else:
            receiver.turns.receive(source, event)

    @property
    def busy(self) -> list[tuple[str, str]]:
        return [channel for channel, events in self.channels.items() if events]

    def settle(self) -> None:
        """Deliver everything, and decide whatever has its turn."""
        while True:
            if busy := self.busy:
                self.deliver(busy[0])
            elif ready := [r for r in self.replicas.values() if r.deciding]:
                ready[0].decide()
            else:
                return


@given(
    count=st.integers(2, 4),
    steps=st.lists(st.tuples(st.sampled_from("edd>>>>"), st.integers(0, 11)), max_size=120),
)
def test_one_replica_decides_at_a_time_and_knows_all_before(
    count: int, steps: list[tuple[str, int]]
) -> None:
    network = Network(count)
    replicas = list(network.replicas.values())
    for action, number in steps:
        replica = replicas[number % count]
        if action == "e":
            replica.enter()
        elif action == "d" and replica.deciding:
            # Of every earlier decision, wherever it was made.
            assert replica.heard == set(range(1, network.decisions + 1))
            replica.decide()
        elif action == ">" and (busy := network.busy):
            network.deliver(busy[number % len(busy)])
        assert sum(bool(each.deciding) for each in replicas) <= 1
    network.settle()
    # Every request had its turn, and no replica was skipped.
    assert [each.decided for each in replicas] == [each.entered for each in replicas]
    assert sum(each.expired for each in replicas) == 0


def test_a_replica_that_is_alone_decides_at_once() -> None:
    network = Network(1)
    (replica,) = network.replicas.values()
    for _ in range(3):
        replica.enter()
        assert len(replica.deciding) == 1
        replica.decide()


def test_requests_that_come_during_a_turn_wait_for_the_next_one() -> None:
    network = Network(2)
    first, second = network.replicas.values()
    first.enter()
    network.deliver(("a", "b"))
    network.deliver(("b", "a"))
    second.enter()
    network.deliver(("b", "a"))
    first.enter()
    assert (len(first.deciding), len(second.deciding)) == (1, 0)
    first.decide()
    # The other one asked before: it goes first.
    while ("a", "b") in network.busy:
        network.deliver(("a", "b"))
    assert (len(first.deciding), len(second.deciding)) == (0, 1)


def test_a_replica_that_does_not_grant_in_time_is_skipped_for_a_while_that_doubles() -> None:
    network = Network(3)
    first, second, third = network.replicas.values()
    pause = FIRST_PAUSE
    for _ in range(3):
        first.enter()
        network.deliver(("a", "b"))
        network.deliver(("b", "a"))
        assert not first.deciding
        first.pass_time(LONGEST_WAIT)
        assert len(first.deciding) == 1
        first.decide()
        # The other one grants too late: that ends no pause.
        network.settle()
        first.enter()
        assert not any(isinstance(event, TurnAsked) for event in network.channels["a", "c"])
        network.settle()
        first.pass_time(pause)
        pause *= 2
    assert first.expired == 3
    first.enter()
    network.settle()
    assert first.pauses == [], "a grant in time: the next pause is short again"
    assert (first.decided, second.decided, third.decided) == (7, 0, 0)


def test_replicas_that_skip_each_other_ask_again() -> None:
    network = Network(2)
    first, second = network.replicas.values()
    for replica in (first, second):
        replica.enter()
    for channel in network.channels.values():
        channel.clear()
    for replica in (first, second):
        replica.pass_time(LONGEST_WAIT)
        replica.decide()
        replica.pass_time(FIRST_PAUSE)
    network.settle()
    first.enter()
    assert not first.deciding
    network.settle()
    assert (first.decided, first.expired) == (2, 1)


def test_a_peer_that_is_forgotten_is_neither_waited_for_nor_kept() -> None:
    network = Network(2)
    first, _ = network.replicas.values()
    first.enter()
    first.turns.forget("b")
    assert len(first.deciding) == 1
    first.decide()
    first.enter()
    first.pass_time(LONGEST_WAIT)
    first.turns.forget("b")
    assert first.pauses == []


def test_an_alarm_of_an_earlier_turn_does_nothing() -> None:
    network = Network(2)
    first, _ = network.replicas.values()
    first.enter()
    [(_, alarm)] = first.alarms
    network.settle()
    first.enter()
    alarm()
    assert (len(first.deciding), first.expired) == (0, 0)
    network.settle()
    assert first.decided == 2


def test_a_request_that_gives_up_passes_the_turn_on() -> None:
    network = Network(2)
    first, second = network.replicas.values()
    never: list[str] = []
    first.turns.enter(never.clear)
    first.turns.leave(never.clear)
    second.enter()
    network.settle()
    assert second.decided == 1
