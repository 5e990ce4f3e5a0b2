"""Tells a hung engine from a slow one: an engine that is silent on every leg is asked for a sign.

    pulse = vigil.watch(address, leg)     # leg.silent(detail) is called should the engine hang
    pulse.alive = True                    # with every byte
    pulse.leave(leg)

After `silence` seconds without a byte from an engine, its `/health` is asked on a connection apart;
any answer is a sign of life, and with none for as long again all its legs are told. One timer
serves all legs; a leg costs a set's entry and its bytes an assignment.
"""

import asyncio
from typing import Final, Protocol

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort

from ..http.collect import Answer, Collector, NoAnswer
from ..http.messages import request_bytes
from ..http.upstream import Call, Failure, Pool

_TICKS: Final = 4
"""In `silence` seconds: how much later than due an engine is asked or given up."""


class Watched(Protocol):
    """A leg that waits for its engine."""

    def silent(self, detail: str) -> None:
        """The engine hangs. The leg is still out."""


class Pulse:
    """One engine's signs of life."""

    __slots__ = ("alive", "asked", "call", "heard", "legs")

    def __init__(self, now: float) -> None:
        self.alive = False
        """It sent something since the last tick."""
        self.heard = now
        self.asked: float | None = None
        self.call: Call | None = None
        self.legs: set[Watched] = set()

    def leave(self, leg: Watched) -> None:
        """The leg waits no more."""
        self.legs.discard(leg)


class Vigil:
    """Every engine that is waited for."""

    def __init__(self, pool: Pool, silence: float) -> None:
        self.silence = silence
        """Seconds. Replaced by a reload."""
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._pulses: dict[HostPort, Pulse] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def watch(self, address: HostPort, leg: Watched) -> Pulse:
        """Wait for `address` from now on; `leave` ends it."""
        pulse = self._pulses.get(address)
        if pulse is None:
            pulse = self._pulses[address] = Pulse(self._loop.time())
        elif not pulse.legs:
            pulse.alive = True
        pulse.legs.add(leg)
        if self._timer is None:
            self._schedule()
        return pulse

    def close(self) -> None:
        """Wait for nobody any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for pulse in self._pulses.values():
            _stop_asking(pulse)
        self._pulses.clear()

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        # Timers run before what has arrived is read: after a stall of ours nobody is judged.
        if now - self._due < self.silence / _TICKS:
            self._look(now)
        if self._pulses and self._timer is None:
            self._schedule()

    def _schedule(self) -> None:
        self._due = self._loop.time() + self.silence / _TICKS
        self._timer = self._loop.call_at(self._due, self._tick)

    def _look(self, now: float) -> None:
        for address, pulse in list(self._pulses.items()):
            if not pulse.legs:
                _stop_asking(pulse)
                del self._pulses[address]
            elif pulse.alive:
                pulse.alive, pulse.heard = False, now
                _stop_asking(pulse)
            elif pulse.asked is None:
                if now - pulse.heard >= self.silence:
                    self._ask(address, pulse, now)
            elif now - pulse.asked >= self.silence:
                self._give_up(address, pulse, now)

    def _ask(self, address: HostPort, pulse: Pulse, now: float) -> None:
        def done(answer: Answer | NoAnswer) -> None:
            pulse.call = None
            # A connection that is not made says nothing. A refusal is a sign, and one that breaks
            # off: an engine that ends takes no more, and a dead one's legs break by themselves.
            if isinstance(answer, Answer) or answer.failure is not Failure.UNREACHABLE:
                pulse.alive = True

        pulse.asked = now
        host = [(b"host", str(address).encode())]
        request = request_bytes(b"GET", endpoints.HEALTH.encode(), host, b"")
        pulse.call = self._pool.send(address, b"GET", request, Collector(done))

    def _give_up(self, address: HostPort, pulse: Pulse, now: float) -> None:
        _stop_asking(pulse)
        pulse.heard = now
        detail = f"{address}: no sign of life for {2 * self.silence:.3g}s"
        for leg in list(pulse.legs):
            # What follows one leg's end may be another's.
            if leg in pulse.legs:
                pulse.leave(leg)
                leg.silent(detail)


def _stop_asking(pulse: Pulse) -> None:
    pulse.asked = None
    if pulse.call is not None:
        pulse.call.abort()
        pulse.call = None
