"""Legs that can leave a silent engine wait less for it than others; time is the test's own."""

import asyncio
import math
import socket
import time
from collections.abc import AsyncIterator, Callable

import pytest
import uvloop

from tandem_contract.commandline import HostPort
from tandem_http1.connection import Failure
from tandem_http1.messages import ResponseHead, request_bytes
from tandem_http1.upstream import Pool
from tandem_sidecar.handoff.engine_liveness import EngineLiveness, LegLiveness
from tandem_sidecar.handoff.liveness import KEPT, LivenessMonitor
from tandem_sidecar.handoff.token_gaps import FEWEST, WINDOW
from tandem_sidecar.settings import Patience

from ..peers import FakeDecode, Turn, hangs, healthy

SILENCE = 1000.0
PATIENCE = Patience(200.0, 100.0)
"""Longer than any test, so that the monitor's own timer never fires."""
HUNG = PATIENCE.silence + PATIENCE.answer


class Leg:
    """A leg that another engine takes if `can_leave`."""

    def __init__(self, *, can_leave: bool = True) -> None:
        self.can_leave = can_leave
        self.has_begun = self.awaits_token = False
        self.tries: list[str] = []
        self.hung = ""
        self.liveness: LegLiveness

    def engine_hung(self, detail: str) -> None:
        self.hung = detail

    def try_leave(self, detail: str) -> bool:
        self.tries.append(detail)
        if self.can_leave:
            self.liveness.unwatch()
        return self.can_leave


class Engine(FakeDecode):
    """Counts its probes."""

    def __init__(self) -> None:
        super().__init__()
        self.health = self.count
        self.answer = hangs
        self.probes = 0
        self.probed = asyncio.Event()

    async def count(self, turn: Turn) -> None:
        self.probes += 1
        self.probed.set()
        await self.answer(turn)


class Case:
    """A monitor and the engine that it monitors."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.pool = engine, Pool()
        self.monitor = LivenessMonitor(self.pool, SILENCE, PATIENCE)
        # A whole number, so that sums are exact: a deadline is reached to the second.
        self.begin = float(math.ceil(asyncio.get_running_loop().time()))
        self.legs: list[Leg] = []
        self.answers = False
        """Whether the engine answers each probe before the next check."""

    def state(self) -> EngineLiveness:
        """What the monitor knows of the engine."""
        return self.legs[0].liveness.engine

    def movable(self, *, can_leave: bool = True, size: int = 0, at: float = 0.0) -> Leg:
        """`size`, `at`: the bytes of its prompt, and when it began."""
        leg = Leg(can_leave=can_leave)
        leg.liveness = self.monitor.watch_movable(self.engine.address, leg)
        leg.liveness.began, leg.liveness.prompt_bytes = self.begin + 1.0 + at, size
        self.legs.append(leg)
        return leg

    def patient(self) -> Leg:
        leg = Leg()
        leg.liveness = self.monitor.watch(self.engine.address, leg)
        self.legs.append(leg)
        return leg

    def check(self, at: float) -> None:
        """Look at the engine so many seconds after the case's begin, and one more, in which the
        legs were made."""
        if self.answers:
            self.state().has_answered = True
        self.monitor.check(self.begin + 1.0 + at)

    async def answered(self) -> None:
        """The engine answers its probe."""
        async with asyncio.timeout(10):
            while not self.state().has_answered:
                await asyncio.sleep(0.005)

    def stream(self, legs: list[Leg], times: int, every: float, begin: float = 0.0) -> float:
        """All `legs` get a token so often; returns when the last came."""
        at = begin
        for _ in range(times):
            at += every
            for leg in legs:
                leg.liveness.alive = leg.has_begun = leg.awaits_token = True
            self.check(at)
        return at


@pytest.fixture
async def case() -> AsyncIterator[Case]:
    async with Engine() as engine:
        made = Case(engine)
        yield made
        made.monitor.close()
        made.pool.close()


async def test_movable_legs_leave_first(case: Case) -> None:
    legs, patient = [case.movable() for _ in range(3)], case.patient()
    case.check(PATIENCE.silence - 10)
    case.check(PATIENCE.silence)
    await asyncio.wait_for(case.engine.probed.wait(), 10)
    case.check(HUNG - 10)
    assert not any(leg.tries for leg in legs)
    case.check(HUNG)
    assert all("no sign of life" in leg.tries[0] for leg in legs)
    case.check(2 * SILENCE - 10)
    assert not patient.hung
    case.check(2 * SILENCE)
    assert "no sign of life for 2e+03s" in patient.hung
    assert not patient.tries
    assert case.engine.probes == 1, "one for all legs, and for both times"


async def test_an_engine_that_answers_keeps_its_legs(case: Case) -> None:
    case.engine.answer = healthy
    leg = case.movable()
    for number in range(1, 5):
        case.engine.probed.clear()
        case.check(number * HUNG - PATIENCE.answer)
        await case.answered()
        case.check(number * HUNG)
    assert not leg.tries
    assert case.engine.probes == 4


async def test_a_leg_that_no_engine_takes_stays_and_tries_again(case: Case) -> None:
    leg = case.movable(can_leave=False)
    for number in range(1, 3):
        case.check(number * HUNG - PATIENCE.answer)
        case.check(number * HUNG)
        assert len(leg.tries) == number
    leg.liveness.alive = True
    case.check(3 * HUNG)
    case.check(4 * HUNG)
    assert len(leg.tries) == 2


async def test_a_leg_that_comes_later_has_its_own_time(case: Case) -> None:
    case.movable(), case.patient()
    case.check(PATIENCE.silence)
    case.check(HUNG)
    later = case.movable()
    case.check(HUNG + PATIENCE.silence)
    assert not later.tries
    case.check(2 * HUNG)
    assert later.tries


async def test_an_engine_without_connections_is_asked_again(case: Case) -> None:
    """A patient leg must not fail by one probe that was sent in a short break of the network."""
    case.engine.answer = healthy
    case.movable(can_leave=False)
    patient, engine = case.patient(), case.state()
    case.check(PATIENCE.silence)
    assert engine.probe is not None
    engine.probe.abort()
    engine.probe = None
    case.check(SILENCE)
    await case.answered()
    case.check(2 * SILENCE)
    assert not patient.hung


async def test_a_core_that_hangs_while_its_server_answers(case: Case) -> None:
    case.answers = True
    legs, slow = [case.movable() for _ in range(3)], case.movable()
    last = case.stream([*legs, slow], FEWEST + 2, 10.0)
    slow.liveness.pause()
    case.check(last + HUNG - 10)
    assert not any(leg.tries for leg in legs)
    case.check(last + HUNG)
    for leg in legs:
        assert "no token for" in leg.tries[0]
    # Its client reads slowly, which says nothing of the engine.
    assert not slow.tries


@pytest.mark.parametrize(
    ("size", "prefill"),
    [
        (100, 4 * 20.0),  # as long as others, whose first token came after 20 s
        (101, SILENCE),
        (0, SILENCE),
    ],
)
async def test_a_prompt_may_delay_the_others_tokens(case: Case, size: int, prefill: float) -> None:
    case.answers, last = True, served(case, 100, 20.0)
    stream = case.movable()
    last = case.stream([stream], FEWEST + 2, 10.0, last)
    waits = case.movable(size=size, at=last)
    case.check(last + HUNG + prefill - 10)
    assert not stream.tries
    case.check(last + HUNG + prefill)
    assert "no token for" in stream.tries[0]
    assert "no token for" in waits.tries[0]


async def test_the_deadline_is_that_of_the_engine(case: Case) -> None:
    case.answers, leg = True, case.movable()
    last = case.stream([leg], FEWEST + 2, 150.0)
    case.check(last + HUNG)
    case.check(last + 550)
    assert not leg.tries
    case.check(last + 650)
    assert leg.tries


async def test_nothing_is_late_where_nothing_is_learned(case: Case) -> None:
    case.answers, leg = True, case.movable()
    last = case.stream([leg], FEWEST, 10.0)
    case.check(last + 10 * HUNG)
    assert not leg.tries


async def test_one_stream_that_stands_still_leaves_alone(case: Case) -> None:
    """A data-parallel rank that hangs, for instance."""
    stands, others = case.movable(), [case.movable() for _ in range(3)]
    last = case.stream([stands, *others], FEWEST + 2, 10.0)
    case.stream(others, 40, 10.0, last)
    assert stands.tries
    assert not any(leg.tries for leg in others)


async def test_a_stream_whose_client_is_slow_is_not_late(case: Case) -> None:
    slow, other = case.movable(), case.movable()
    last = case.stream([slow, other], FEWEST + 2, 10.0)
    slow.liveness.alive = True
    slow.liveness.pause()
    last = case.stream([other], 40, 10.0, last)
    slow.liveness.resume()
    last = case.stream([other], 40, 10.0, last)
    assert not slow.tries
    last = case.stream([slow, other], 2, 10.0, last)
    case.stream([other], 40, 10.0, last)
    assert slow.tries


def served(case: Case, size: int, after: float, begin: float = 0.0) -> float:
    """Streams with a prompt of so many bytes got their first token after so long; returns when
    they did."""
    legs = [case.movable(size=size, at=begin) for _ in range(FEWEST)]
    at = case.stream(legs, 1, after, begin)
    for leg in legs:
        leg.liveness.unwatch()
    return at


@pytest.mark.parametrize(("after", "deadline"), [(10.0, SILENCE), (400.0, 1600.0)])
async def test_a_first_token_that_stays_away(case: Case, after: float, deadline: float) -> None:
    case.answers = True
    patient, last = case.patient(), served(case, 100, after)
    leg, longer, unknown = (case.movable(size=size, at=last) for size in (100, 101, 0))
    case.check(last + deadline - 10)
    assert not leg.tries
    case.check(last + deadline)
    assert "no first token for" in leg.tries[0]
    # No prompt of its length was computed yet, or how long that takes is not known.
    assert not longer.tries
    assert not unknown.tries
    assert not patient.hung


async def test_a_first_token_may_come_late_while_the_engine_sends_others(case: Case) -> None:
    last = served(case, 100, 10.0)
    waits, stream = case.movable(size=100, at=last), case.movable()
    case.stream([stream], 200, 10.0, last)
    assert not waits.tries


async def test_answers_that_come_and_end_between_two_checks_are_signs_of_life(case: Case) -> None:
    last = served(case, 100, 10.0)
    waits = case.movable(size=100, at=last)
    for number in range(1, 40):
        whole = case.movable()
        whole.liveness.alive = True
        whole.liveness.unwatch()
        case.check(last + number * PATIENCE.silence)
    assert case.engine.probes == 0
    assert not waits.tries


async def test_a_stream_without_an_event_for_each_token_has_begun_with_its_first(
    case: Case,
) -> None:
    """A parser holds the text of a tool call back."""
    case.answers, last = True, served(case, 100, 10.0)
    leg = case.movable(size=100, at=last)
    leg.liveness.alive = leg.has_begun = True
    case.check(last + 10)
    case.check(last + 20 * SILENCE)
    assert not leg.tries


async def test_a_time_and_its_prompt_are_forgotten_together(case: Case) -> None:
    case.answers, last = True, served(case, 1000, 400.0)
    last = served(case, 100, 10.0, last + 2 * WINDOW)
    short, long = case.movable(size=100, at=last), case.movable(size=1000, at=last)
    case.check(last + SILENCE)
    assert short.tries
    assert not long.tries


async def test_a_probe_that_the_event_loop_delays_has_its_time(case: Case) -> None:
    """Between its being asked for and its being sent the loop may stand still."""
    leg = case.movable()
    case.check(PATIENCE.silence)
    case.monitor.check(case.begin + 1.0 + HUNG + 50, late=100.0)
    assert not leg.tries
    case.check(HUNG + 100)
    assert leg.tries


async def test_an_engine_that_takes_the_place_of_a_forgotten_one_is_kept(case: Case) -> None:
    class Leaver(Leg):
        def try_leave(self, detail: str) -> bool:
            case.monitor._drop_idle()
            case.movable()
            return super().try_leave(detail)

    leaver = Leaver()
    leaver.liveness = case.monitor.watch_movable(HostPort("127.0.0.1", 1), leaver)
    case.monitor.check(case.begin + 1.0 + PATIENCE.silence)
    case.movable().liveness.unwatch()
    case.monitor.check(case.begin + 1.0 + HUNG)
    assert leaver.tries
    forgotten, latest = case.legs
    assert latest.liveness.engine is not forgotten.liveness.engine
    assert case.movable().liveness.engine is latest.liveness.engine


async def test_what_was_learned_outlives_a_short_rest(case: Case) -> None:
    last = served(case, 100, 10.0)
    engine = case.state()
    case.check(last + 10)
    assert case.movable().liveness.engine is engine
    case.legs[-1].liveness.unwatch()
    case.check(last + KEPT + 30)
    assert case.movable().liveness.engine is not engine


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_after_a_stall_what_came_meanwhile_is_read_first(
    new_loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """The engine sends something while the event loop stands still for longer than a leg waits."""

    async def stall() -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.setblocking(False)
            loop, pool, leg = asyncio.get_running_loop(), Pool(), Leg()
            monitor = LivenessMonitor(pool, 1.0, Patience(0.1, 1.0))
            address, has_read = HostPort(*server.getsockname()), asyncio.Event()
            leg.liveness = monitor.watch_movable(address, leg)

            def on_read() -> None:
                leg.liveness.alive = True
                has_read.set()

            def stand_still() -> None:
                engine.send(HEAD)
                time.sleep(1.5)

            calls, connections = [], []
            for on_head in (on_read, stand_still):
                request = request_bytes(b"GET", b"/", [], b"")
                calls.append(pool.send(address, b"GET", request, Reader(on_head)))
                connections.append((await loop.sock_accept(server))[0])
            engine, other = connections
            probed, _ = await loop.sock_accept(server)
            with engine, other, probed:
                other.send(HEAD)
                await has_read.wait()
                assert not leg.tries
            for call in calls:
                call.abort()
            monitor.close()
            pool.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.wait_for(stall(), 10))


HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\n"


class Reader:
    """Receives the head of an answer."""

    payload_only = True

    def __init__(self, on_head: Callable[[], None]) -> None:
        self._on_head = on_head

    def head(self, head: ResponseHead) -> None:
        self._on_head()

    def body(self, data: bytes, last: bool) -> None:
        raise AssertionError

    def failed(self, failure: Failure, detail: str) -> None:
        raise AssertionError(failure, detail)


async def test_a_leg_that_leaves_within_a_check_is_watched_at_its_next_engine() -> None:
    """By the monitor's own timer, which the leg sets anew within the check."""
    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    left = asyncio.Event()
    async with Engine() as engine, Engine() as other:
        pool = Pool()
        monitor = LivenessMonitor(pool, 10.0, Patience(0.05, 0.05))

        class Moving(Leg):
            def try_leave(self, detail: str) -> bool:
                if self.liveness.engine is not first:
                    left.set()
                    return False
                self.liveness.unwatch()
                self.liveness = monitor.watch_movable(other.address, self)
                return True

        leg = Moving()
        leg.liveness = monitor.watch_movable(engine.address, leg)
        first = leg.liveness.engine
        await asyncio.wait_for(left.wait(), 10)
        monitor.close()
        pool.close()
    assert errors == []
