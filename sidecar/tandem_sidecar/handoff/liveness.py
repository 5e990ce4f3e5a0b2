"""Tells a hung engine from a slow one, by probing `/health` of engines that send nothing.

    liveness = monitor.watch(address, leg)    # calls leg.engine_hung(detail) if the engine hangs
    liveness.alive = True                     # with every byte from the engine
    liveness.unwatch(leg)

If an engine sends no byte on any leg for `silence` seconds, the monitor requests its `/health` on a
separate connection. Any answer proves it alive; if none comes for another `silence` seconds, all
its legs fail. One timer serves all engines: a leg costs one set entry, and each of its reads one
assignment.
"""

import asyncio
from typing import Final, Protocol

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.connection import Call, Failure
from tandem_http1.messages import request_bytes
from tandem_http1.upstream import Pool

MAX_IDLE: Final = 128
"""Engines without legs that are kept until the next check."""
_TICKS: Final = 4
"""Checks in `silence` seconds: an engine is probed, or given up, up to a quarter of it late."""


class MonitoredLeg(Protocol):
    """A leg that waits for bytes from its engine."""

    def engine_hung(self, detail: str) -> None:
        """The engine hangs. The leg is still in flight: abort it."""


class EngineLiveness:
    """The state of one engine, and the legs that wait for it."""

    __slots__ = ("alive", "last_alive", "legs", "probe", "probed_at")

    def __init__(self, now: float) -> None:
        self.alive = False
        """Whether the engine sent something since the last check."""
        self.last_alive = now
        self.probed_at: float | None = None
        """When `/health` was requested; None: no probe is in flight or unanswered."""
        self.probe: Call | None = None
        self.legs: set[MonitoredLeg] = set()

    def unwatch(self, leg: MonitoredLeg) -> None:
        """Stop monitoring for `leg`."""
        self.legs.discard(leg)


class LivenessMonitor:
    """Probes `/health` of engines that sent no byte for `silence` seconds."""

    def __init__(self, pool: Pool, silence: float) -> None:
        self.silence = silence
        """Seconds. Replaced by a reload."""
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._engines: dict[HostPort, EngineLiveness] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def watch(self, address: HostPort, leg: MonitoredLeg) -> EngineLiveness:
        """Monitor the engine at `address` for `leg`, until `unwatch`."""
        engine = self._engines.get(address)
        if engine is None:
            if len(self._engines) % MAX_IDLE == MAX_IDLE - 1:
                self._drop_idle()
            engine = self._engines[address] = EngineLiveness(self._loop.time())
        elif not engine.legs:
            # Without legs the engine had no reason to send anything: its silence starts now.
            engine.alive = True
        engine.legs.add(leg)
        if self._timer is None:
            self._schedule()
        return engine

    def close(self) -> None:
        """Stop monitoring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for engine in self._engines.values():
            _cancel_probe(engine)
        self._engines.clear()

    def _drop_idle(self) -> None:
        """Between two checks requests may name any number of engines, each its own."""
        for address in [each for each, engine in self._engines.items() if not engine.legs]:
            _cancel_probe(self._engines.pop(address))

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        # Timers run before received data is processed. After a stall of the event loop, bytes that
        # prove an engine alive may still be unread, so this check is skipped.
        if now - self._due < self.silence / _TICKS:
            self._check_engines(now)
        if self._engines and self._timer is None:
            self._schedule()

    def _schedule(self) -> None:
        self._due = self._loop.time() + self.silence / _TICKS
        self._timer = self._loop.call_at(self._due, self._tick)

    def _check_engines(self, now: float) -> None:
        for address, engine in list(self._engines.items()):
            # Dropped here, not in `unwatch`: an engine whose next leg comes soon keeps its entry.
            if not engine.legs:
                _cancel_probe(engine)
                del self._engines[address]
            elif engine.alive:
                # The flag is reset here, so that a read from the engine costs one assignment and no
                # clock.
                engine.alive, engine.last_alive = False, now
                _cancel_probe(engine)
            elif engine.probed_at is None:
                if now - engine.last_alive >= self.silence:
                    self._send_probe(address, engine, now)
            elif now - engine.probed_at >= self.silence:
                self._report_hung(address, engine, now)

    def _send_probe(self, address: HostPort, engine: EngineLiveness, now: float) -> None:
        def done(answer: Answer | NoAnswer) -> None:
            # `probed_at` stays: the next check clears it if the engine is alive, and the legs fail
            # if not.
            engine.probe = None
            # Without a connection nothing is known. A refused or broken connection counts as alive:
            # an engine that shuts down closes its listener first and still finishes its requests,
            # and the legs of an engine that died break by themselves.
            if isinstance(answer, Answer) or answer.failure is not Failure.UNREACHABLE:
                engine.alive = True

        engine.probed_at = now
        host = [(b"host", str(address).encode())]
        request = request_bytes(b"GET", endpoints.HEALTH.encode(), host, b"")
        engine.probe = self._pool.send(address, b"GET", request, Collector(done))

    def _report_hung(self, address: HostPort, engine: EngineLiveness, now: float) -> None:
        _cancel_probe(engine)
        # Legs that start after this get a full period of silence of their own.
        engine.last_alive = now
        detail = f"{address}: no sign of life for {2 * self.silence:.3g}s"
        for leg in list(engine.legs):
            # Ending one leg may end another, which must then not be reported.
            if leg in engine.legs:
                engine.unwatch(leg)
                leg.engine_hung(detail)


def _cancel_probe(engine: EngineLiveness) -> None:
    engine.probed_at = None
    if engine.probe is not None:
        engine.probe.abort()
        engine.probe = None
