"""Replicas decide one after the other: the mutual exclusion of Ricart and Agrawala. Pure.

A placement reaches the other replicas after some milliseconds. Replicas that decide on a burst at
the same time, from the same figures, would all choose the same pods. So a replica asks the others
for the turn and decides when all have granted it:

    asks        sends TurnAsked with a number, higher than any that it has seen
    grants      at once, unless it is deciding itself, or asked with a lower number: then when it
                has decided; between equal numbers the lower name goes first
    decides     all requests that wait, when every peer has granted

Events of one replica arrive in order, so with its grant a replica knows what the granting one has
placed. A replica whose grant does not come in time is skipped: then two replicas may decide at
once, which costs waiting behind each other and nothing else. It is asked again after a pause, which
doubles with each further grant that it fails to send in time.

Source: G. Ricart, A. K. Agrawala, "An Optimal Algorithm for Mutual Exclusion in Computer Networks",
Communications of the ACM 24 (1981); numbers are the clock of L. Lamport (1978).
"""

from collections.abc import Callable, Set
from functools import partial
from typing import Final, Protocol, TypeAlias

from .frames import TurnAsked, TurnGranted

LONGEST_WAIT: Final = 0.05
"""Seconds for which a grant is waited for. Too low: in bursts replicas decide at once all the same;
too high: requests wait as long for a replica that hangs."""
FIRST_PAUSE: Final = 1.0
"""Seconds for which a replica is skipped at first."""
LONGEST_PAUSE: Final = 60.0
"""Seconds for which it is skipped at most."""


class TurnChannel(Protocol):
    """Reaches the other replicas."""

    @property
    def instance(self) -> str:
        """The name of this replica."""

    @property
    def connected(self) -> Set[str]:
        """The names of the others that hear this replica and that it hears."""

    def tell(self, peer: str, event: TurnAsked | TurnGranted) -> None:
        """Send an event to one of them soon; it may be lost with the connection."""


Waiter: TypeAlias = Callable[[], object]
"""A request that waits for the turn or has it: called once, when it may be decided."""


class Turns:
    """One replica's side."""

    def __init__(
        self,
        channel: TurnChannel,
        later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """`later(seconds, action)` runs an action later."""
        self._channel, self._later = channel, later
        self.on_expired: Callable[[], object] = lambda: None
        """Called when peers are skipped."""
        self._clock = 0
        """The highest number seen."""
        self._asked: int | None = None
        """The number that this replica asked with; None: it does not ask."""
        self._missing: set[str] = set()
        """Peers that have not granted."""
        self._skipped: set[str] = set()
        """Peers that are not asked for now."""
        self._pauses: dict[str, float] = {}
        """Peer → seconds for which it was skipped the last time; only those that have not granted
        in time since."""
        self._deferred: dict[str, int] = {}
        """Peer → number that it asked with; granted when this replica has decided."""
        self._waiting: list[Waiter] = []
        self._deciding: set[Waiter] = set()

    def enter(self, waiter: Waiter) -> None:
        """Call `waiter` when its turn has come, perhaps at once. To be followed by `leave`."""
        self._waiting.append(waiter)
        if self._asked is None and not self._deciding:
            self._ask()

    def leave(self, waiter: Waiter) -> None:
        """The request is decided, or does not wait any longer."""
        if waiter in self._deciding:
            self._deciding.remove(waiter)
            if not self._deciding:
                self._end()
        else:
            self._waiting.remove(waiter)

    def receive(self, peer: str, event: TurnAsked | TurnGranted) -> None:
        """`peer` told something."""
        self._clock = max(self._clock, event.number)
        if isinstance(event, TurnAsked):
            if self._deciding or self._is_before(event.number, peer):
                self._deferred[peer] = event.number
            else:
                self._channel.tell(peer, TurnGranted(event.number))
        # A grant that comes too late is of an earlier number.
        elif event.number == self._asked:
            self._missing.discard(peer)
            self._pauses.pop(peer, None)
            self._begin_if_granted()

    def forget(self, peer: str) -> None:
        """`peer` is gone, or has connected anew."""
        self._skipped.discard(peer)
        self._pauses.pop(peer, None)
        if peer in self._missing:
            self._missing.remove(peer)
            self._begin_if_granted()

    def _is_before(self, number: int, peer: str) -> bool:
        """Whether this replica asked before `peer`, which asked with `number`."""
        return self._asked is not None and (self._asked, self._channel.instance) < (number, peer)

    def _ask(self) -> None:
        self._clock += 1
        self._asked = self._clock
        self._missing = set(self._channel.connected) - self._skipped
        for peer in self._missing:
            self._channel.tell(peer, TurnAsked(self._asked))
        if self._missing:
            self._later(LONGEST_WAIT, partial(self._expire, self._asked))
        self._begin_if_granted()

    def _expire(self, number: int) -> None:
        if number == self._asked:
            for peer in self._missing:
                self._skip(peer)
            self._missing.clear()
            self.on_expired()
            self._begin_if_granted()

    def _skip(self, peer: str) -> None:
        pause = min(LONGEST_PAUSE, 2.0 * self._pauses.get(peer, FIRST_PAUSE / 2.0))
        self._pauses[peer] = pause
        self._skipped.add(peer)
        self._later(pause, partial(self._skipped.discard, peer))

    def _begin_if_granted(self) -> None:
        if self._missing:
            return
        self._asked = None
        # Others that enter meanwhile wait for the next turn: so every turn ends.
        admitted, self._waiting = self._waiting, []
        self._deciding.update(admitted)
        for waiter in admitted:
            waiter()
        if not admitted:
            self._end()

    def _end(self) -> None:
        deferred, self._deferred = self._deferred, {}
        for peer, number in deferred.items():
            self._channel.tell(peer, TurnGranted(number))
        if self._waiting:
            self._ask()
