"""Holds the tasks of requests while no pod has room for them.

    must_wait(model, size)   cheap: whether a request may have to wait
    enter(request, ...)      what waits; None: it goes at once
    async with turn(task)    waits; within it the request is placed, so that it counts before the
                             next one goes

Time alone makes room, too, as prompts are computed: so while something waits, the pods are looked
at every `_CHECK_SECONDS`.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import ceil
from random import Random
from time import monotonic, time
from typing import Final, NamedTuple, Protocol

from ..backends.fleet import Fleet
from ..exchange import HttpRequest, NotPlaced
from ..metrics.faults import Faults
from ..request.inference import InferenceRequest
from .elsewhere import WaitingElsewhere
from .flows import DISPLACED, EXPIRED, FULL, LEFT, SHED, STOPPING, WENT, Flows
from .headers import shorter_ttl, ttft_target
from .metrics import FlowMetrics
from .requests import Held
from .settings import BandSettings, FlowSettings

_CHECK_SECONDS: Final = 0.01
"""Seconds between two looks at the pods while requests wait, if nothing else happens. Longer: an
engine may run dry. Shorter: costs CPU, a few microseconds each."""
_MOST_RETRY_AFTER: Final = 60
"""Seconds."""
_MESSAGES: Final = {
    FULL: "too many requests wait: try again later",
    DISPLACED: "requests of a higher priority need the place of this one: try again later",
    EXPIRED: "no backend had room for the request in time: try again later",
    SHED: "requests of a negative priority are refused while others wait: try again later",
    STOPPING: "the endpoint picker is shutting down: send the request again",
}
_NO_BACKEND: Final = "no backend became ready in time: try again"


class Refuse(Protocol):
    """Makes a reply: `placement.refusals.Refusals.error`."""

    def __call__(
        self,
        request: HttpRequest | None,
        status: int,
        reason: str,
        message: str,
        *,
        retry_after: int = 1,
    ) -> NotPlaced: ...


class Turn(NamedTuple):
    """What became of the wait."""

    refusal: NotPlaced | None = None
    """The request's answer; None: it is placed now."""
    seconds: float = 0.0
    """How long it waited."""
    subset: frozenset[str] | None = None
    """Addresses of the pods that it may go to; None: any."""


class FlowTask(Held):
    """A request that waits, and its task."""

    __slots__ = ("request", "turn")

    request: HttpRequest
    turn: "asyncio.Future[NotPlaced | None]"


class Outlook(NamedTuple):
    """What a request would take if it were placed now."""

    tokens: int
    """Of its prompt, as far as no pod has their KV."""
    is_split: bool
    """Whether a prefill pod would compute it."""


class FlowController:
    """The waiting requests of a process. Belongs to one event loop."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: FlowMetrics,
        faults: Faults,
        *,
        refuse: Refuse,
        outlook: Callable[[HttpRequest, InferenceRequest, float], Outlook],
        priority: Callable[[HttpRequest], int],
        tenant: Callable[[HttpRequest], str],
        random: Random,
    ) -> None:
        """`outlook`: what the choice would do now, Unix seconds; `tenant`: whose a request is."""
        self._fleet, self._metrics, self._faults = fleet, metrics, faults
        self._refuse, self._outlook = refuse, outlook
        self._priority, self._tenant = priority, tenant
        self._flows = Flows[FlowTask](fleet, self._on_end, random)
        self._timer: asyncio.TimerHandle | None = None
        """Looks again; not None exactly while something waits for room."""
        self._is_stopping = False
        self._inside = 0
        """Requests within `turn`."""
        self._left = asyncio.Event()
        """One of them has left."""

    @property
    def settings(self) -> FlowSettings | None:
        """None: no request waits. May be replaced at any time; what waits keeps its deadline."""
        return self._flows.settings

    @settings.setter
    def settings(self, settings: FlowSettings | None) -> None:
        self._flows.settings = settings
        if self._flows.waiting:
            self._advance()

    @property
    def elsewhere(self) -> WaitingElsewhere:
        """What waits here and at other replicas."""
        return self._flows.elsewhere

    def limit_bytes(self, limit: int) -> None:
        """The bodies that wait have so many bytes at most, whatever the settings say."""
        self._flows.byte_limit = limit

    @property
    def is_on(self) -> bool:
        """Whether any request waits."""
        return self._flows.settings is not None

    def longest_wait(self) -> float:
        """Seconds that any request may wait; 0: none waits. Called for a request that waits, and
        whose gateway must be asked for that time."""
        seconds = self.settings.longest_ttl if self.settings is not None else 0.0
        self._metrics.asked(seconds)
        return seconds

    @property
    def waiting(self) -> int:
        """Requests that wait."""
        return self._flows.waiting

    @property
    def needs_model(self) -> bool:
        """Whether it depends on a request's model whether it waits."""
        return self._fleet.depends_on_model

    def must_wait(self, model: str | None, size: int, hint: frozenset[str] | None = None) -> bool:
        """Whether a request for `model` whose body has `size` bytes may have to wait. `hint`:
        addresses of the pods that its gateway allows; None: all."""
        waits = False
        with self._faults.contained("flow"):
            waits = self._flows.must_wait(model, size, time(), hint)
        return waits or (self._is_stopping and self.is_on)

    def enter(
        self, request: HttpRequest, parsed: InferenceRequest | None, size: int
    ) -> FlowTask | None:
        """A request whose body has `size` bytes, and which waits now or is refused: `turn` tells.
        None: it goes at once. `parsed`: what was read of it; None: it is refused or passed through,
        and waits for nothing."""
        with self._faults.contained("flow"):
            return self._enter(request, parsed, size)
        return None

    @asynccontextmanager
    async def turn(self, task: FlowTask) -> AsyncIterator[Turn]:
        """Wait for the turn of a request; it is placed within."""
        self._inside += 1
        try:
            self._advance()
            refusal = await task.turn
            yield Turn(refusal, monotonic() - task.arrived, task.subset)
        finally:
            # Also without a turn: its client has left, or something went wrong.
            self._flows.leave(task, monotonic())
            self._inside -= 1
            self._left.set()
            self._advance()

    async def close(self) -> None:
        """Refuse all that wait and all that come from now on: the process ends. Returns when they
        are answered."""
        self._is_stopping = True
        self._flows.stop(monotonic())
        while self._inside:
            self._left.clear()
            await self._left.wait()

    def _enter(
        self, request: HttpRequest, parsed: InferenceRequest | None, size: int
    ) -> FlowTask | None:
        """The task of a request that waits, or is refused already; None: it goes at once."""
        settings, now = self.settings, time()
        if settings is None or parsed is None:
            return None
        if not self.must_wait(parsed.model, size, request.subset):
            return None
        task = self._task(request, parsed, size, settings)
        if self._is_stopping:
            reason: str | None = STOPPING
        elif self._flows.passes(task, now):
            return None
        else:
            reason = self._flows.admit(task, settings)
        if reason is None:
            self._count(task)
        else:
            task.has_ended = True
            task.turn.set_result(self._refusal(task, reason, task.arrived))
        return task

    def _task(
        self, request: HttpRequest, parsed: InferenceRequest, size: int, settings: FlowSettings
    ) -> FlowTask:
        now, flows = monotonic(), self._flows
        priority, model = self._priority(request), parsed.model
        outlook = self._outlook(request, parsed, time())
        average = self._fleet.figures.output_tokens
        output = average if parsed.max_tokens is None else min(average, float(parsed.max_tokens))
        band = settings.band(priority)
        task = FlowTask(
            model,
            priority,
            self._tenant(request),
            now,
            now + shorter_ttl(request.headers, flows.ttl(model, priority, settings)),
            size=size,
            tokens=outlook.tokens + output,
            work=parsed.prompt_tokens + output,
            is_split=outlook.is_split and flows.has_prefill_pods(model),
        )
        task.hint, task.order = request.subset, _order(task, request, band)
        task.request, task.turn = request, asyncio.get_running_loop().create_future()
        return task

    def _advance(self) -> None:
        """Let one request go if there is room, and see that somebody looks again."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        is_waiting = True
        with self._faults.contained("flow"):
            is_waiting = self._flows.advance(time(), monotonic())
        if is_waiting and self._flows.waiting:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_CHECK_SECONDS, self._advance)

    def _on_end(self, task: FlowTask, reason: str, at: float) -> None:
        self._count(task)
        if reason in (WENT, LEFT):
            self._metrics.ended(task.priority, reason, at - task.arrived)
            refusal = None
        else:
            refusal = self._refusal(task, reason, at)
        # With the task of a client that left, it is cancelled.
        if not task.turn.done():
            task.turn.set_result(refusal)

    def _count(self, task: FlowTask) -> None:
        model = task.group.model
        self._metrics.demand(model, self._flows.demand[model])
        self._metrics.held(task.priority, self._flows.counts[task.priority], self._flows.bytes)

    def _refusal(self, task: FlowTask, reason: str, at: float) -> NotPlaced:
        self._metrics.ended(task.priority, reason, at - task.arrived)
        if reason == EXPIRED and not self._flows.has_pods(task.model):
            return self._refuse(task.request, 503, "no_backend", _NO_BACKEND)
        message = _MESSAGES[reason]
        if reason == STOPPING:
            return self._refuse(task.request, 503, reason, message)
        wait = max(1, min(_MOST_RETRY_AFTER, ceil(self._flows.expected_wait(task))))
        return self._refuse(task.request, 429, reason, message, retry_after=wait)


def _order(task: FlowTask, request: HttpRequest, band: BandSettings) -> float:
    """What the requests of a tenant are ordered by."""
    match band.order:
        case "arrival":
            return task.arrived
        case "deadline":
            return task.deadline
        case "ttft":
            return task.arrived + ttft_target(request.headers)
