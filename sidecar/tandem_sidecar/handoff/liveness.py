"""Tells a hung engine from a slow one, by probing `/health` of engines that send nothing.

    liveness = monitor.watch(address, leg)    # calls leg.engine_hung(detail) if the engine hangs
    liveness.alive = True                     # with every byte from the engine
    liveness.unwatch()

If an engine sends no byte on any leg for `silence` seconds, the monitor requests its `/health` on a
separate connection. Any answer proves it alive; if none comes for another `silence` seconds, all
its legs fail.

A leg whose request another engine can go on with (`watch_movable`) waits less: to leave an engine
that was only slow costs a recompute, and the client's stream is the same. After `Patience.silence`
seconds without a byte the engine is probed, and without an answer within `Patience.answer` these
legs leave. So does a stream whose tokens stay away for longer than the engine was ever seen to take
(`token_gaps`), though it answers probes.

One timer and one probe serve all legs of an engine: a leg costs one entry, and each of its reads
one assignment.
"""

import asyncio
from typing import Final

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_http1.answers import Answer, Collector, NoAnswer
from tandem_http1.connection import Failure
from tandem_http1.messages import request_bytes
from tandem_http1.upstream import Pool

from ..settings import Patience
from .engine_liveness import EngineLiveness, LegLiveness, MonitoredLeg, MovableLeg

MAX_IDLE: Final = 128
"""Engines without legs that are kept."""
KEPT: Final = 60.0
"""Seconds for which they are, with what was learned of them."""
_TURN: Final = 0.001
"""Seconds in which the event loop reads at least once."""
_TICKS: Final = 4
"""Checks in `silence` seconds: an engine is probed, or given up, up to a quarter of it late. With
movable legs, checks in `Patience.answer` seconds."""


class LivenessMonitor:
    """Probes `/health` of engines that send nothing."""

    def __init__(self, pool: Pool, silence: float, patience: Patience) -> None:
        self.silence = silence
        """Seconds. Replaced by a reload."""
        self._patience = patience
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._engines: dict[HostPort, EngineLiveness] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0

    def watch(self, address: HostPort, leg: MonitoredLeg) -> LegLiveness:
        """Monitor the engine at `address` for `leg`, until `unwatch`."""
        now = self._loop.time()
        engine = self._engines.get(address)
        if engine is None:
            if len(self._engines) % MAX_IDLE == MAX_IDLE - 1:
                self._drop_idle()
            engine = self._engines[address] = EngineLiveness(now)
        elif not engine.legs:
            # Without legs the engine had no reason to send anything: its silence starts now.
            engine.has_answered = True
        state = LegLiveness(engine, now)
        engine.legs[state] = leg
        if self._timer is None:
            self._schedule(now)
        return state

    def watch_movable(self, address: HostPort, leg: MovableLeg) -> LegLiveness:
        """Likewise for a leg that may leave."""
        state = self.watch(address, leg)
        state.engine.movable[state] = leg
        if self._timer is not None and self._due - state.began > self._quick_interval:
            self._timer.cancel()
            self._schedule(state.began)
        return state

    def close(self) -> None:
        """Stop monitoring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for engine in self._engines.values():
            engine.cancel_probe()
        self._engines.clear()

    def check(self, now: float, late: float = 0.0) -> None:
        """Look at every engine at `now`, in loop time: probe it, or end legs that wait in vain. The
        event loop, and so a probe, stood still for the last `late` seconds."""
        for address, engine in list(self._engines.items()):
            is_alive = engine.note_reads(now)
            if not engine.legs:
                engine.cancel_probe()
                # Legs that left may have taken its place for another.
                if now - engine.last_read >= KEPT and self._engines.get(address) is engine:
                    del self._engines[address]
                continue
            if not is_alive:
                if engine.probed_at is not None:
                    engine.probed_at += late
                self._check_silence(address, engine, now)
            if engine.movable:
                self._check_tokens(address, engine, now)

    @property
    def _quick_silence(self) -> float:
        return min(self._patience.silence, self.silence)

    @property
    def _answer(self) -> float:
        return min(self._patience.answer, self.silence)

    @property
    def _quick_interval(self) -> float:
        return self._answer / _TICKS

    def _drop_idle(self) -> None:
        """Requests may name any number of engines, each its own."""
        for address in [each for each, engine in self._engines.items() if not engine.legs]:
            self._engines.pop(address).cancel_probe()

    def _tick(self) -> None:
        # Timers run before received data is processed. After a stall of the event loop, bytes that
        # prove an engine alive may still be unread: they are read before the check, which is about
        # this moment. A probe may not even be sent.
        now = self._loop.time()
        late = max(0.0, now - self._due)
        self._timer = self._loop.call_later(_TURN, self._tick_after_reads, now, late)

    def _tick_after_reads(self, now: float, late: float) -> None:
        self._timer = None
        self.check(now, late)
        self._go_on()

    def _go_on(self) -> None:
        """Schedule the next check, unless a leg that left has done so. A function of its own:
        compiled, the timer would still be taken for None after the call of `check`."""
        if self._engines and self._timer is None:
            self._schedule(self._loop.time())

    def _schedule(self, now: float) -> None:
        is_quick = any(engine.movable for engine in self._engines.values())
        interval = self._quick_interval if is_quick else self.silence / _TICKS
        self._due = now + interval
        self._timer = self._loop.call_at(self._due, self._tick)

    def _check_tokens(self, address: HostPort, engine: EngineLiveness, now: float) -> None:
        deadline = engine.token_deadline(self._quick_silence + self._answer, self.silence)
        if deadline is not None and (late := engine.late(now, deadline)):
            engine.leave(late, f"{address}: no token for {deadline:.3g}s", now)
        deadline = engine.first_deadline(self.silence)
        if deadline is not None and (late := engine.waiting(now, deadline)):
            engine.leave(late, f"{address}: no first token for {deadline:.3g}s", now)

    def _check_silence(self, address: HostPort, engine: EngineLiveness, now: float) -> None:
        silent, suspected = now - engine.last_alive, now - engine.suspected_from
        is_suspect = bool(engine.movable) and suspected >= self._quick_silence
        # Again if no connection was made: a late answer to a probe in flight still counts.
        if engine.probe is None and (is_suspect or silent >= self.silence):
            self._send_probe(address, engine)
            if engine.probed_at is None:
                engine.probed_at = now
        if engine.probed_at is None or now - engine.probed_at < self._answer:
            return
        if is_suspect and suspected >= self._quick_silence + self._answer:
            engine.suspected_from = now
            detail = f"{address}: no sign of life for {silent:.3g}s"
            engine.leave(list(engine.movable), detail, now)
        if silent >= 2 * self.silence:
            self._report_hung(address, engine, now)

    def _send_probe(self, address: HostPort, engine: EngineLiveness) -> None:
        def done(answer: Answer | NoAnswer) -> None:
            # `probed_at` stays: the next check clears it if the engine is alive, and legs leave or
            # fail if not.
            engine.probe = None
            # Without a connection nothing is known. A refused or broken connection counts as alive:
            # an engine that shuts down closes its listener first and still finishes its requests,
            # and the legs of an engine that died break by themselves.
            if isinstance(answer, Answer) or answer.failure is not Failure.UNREACHABLE:
                engine.has_answered = True

        host = [(b"host", str(address).encode())]
        request = request_bytes(b"GET", endpoints.HEALTH.encode(), host, b"")
        engine.probe = self._pool.send(address, b"GET", request, Collector(done))

    def _report_hung(self, address: HostPort, engine: EngineLiveness, now: float) -> None:
        engine.cancel_probe()
        # Legs that start after this get a full period of silence of their own.
        engine.last_alive = engine.suspected_from = now
        detail = f"{address}: no sign of life for {2 * self.silence:.3g}s"
        for state in list(engine.legs):
            # Ending one leg may end another, which must then not be reported.
            if (leg := engine.legs.get(state)) is not None:
                state.unwatch()
                leg.engine_hung(detail)
