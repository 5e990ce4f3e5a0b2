"""The objects that all requests of a process share, the parts of one generation, and the drain.

`SidecarContext` gathers the shared objects. `Lifecycle` is the set of running work: during a drain
it refuses new work, waits for the rest, and ends what is left when the drain timeout passes.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final, Protocol

import msgspec

from tandem_contract.commandline import HostPort
from tandem_contract.concurrent_params import StreamSource
from tandem_contract.overlaps import Overlaps
from tandem_contract.prompt_length import EXHAUSTING, prompt_text
from tandem_contract.request_kinds import RequestKind
from tandem_http1.messages import Headers, Request, ResponseHead
from tandem_http1.upstream import Pool

from ..bodies.parse import Body
from ..connectors import ResolvedConnector
from ..observability.record import Leg, Record
from ..resume.kept_stream import KeptStream
from ..resume.whole_tokens import Vocabularies
from ..security.route import Candidate, Route
from ..settings import Settings
from .breaker import Breakers
from .liveness import LivenessMonitor
from .transfer_monitor import TransferMonitor

STREAMS_PER_POD: Final = 2
"""Prompts under way at a prefill pod with which the next decode leg waits for the prefill's answer:
a prompt that is queued has no KV to read yet. Too many: prompts in the queues of prefill pods hold
the decode engine's blocks; too few: no KV moves while the pod computes several prompts at once."""


class RecordObserver(Protocol):
    """Makes metrics, history, spans and logs of the requests' records."""

    def on_refusal(self) -> None:
        """A generation was refused before it had a record."""

    def on_request_start(self, record: Record) -> None:
        """A request is being served; its record is filled in from now on."""

    def on_answer(self, record: Record, head: ResponseHead | None) -> None:
        """The answer's status is recorded, and its first bytes are about to be written. `head`: of
        the engine's answer; None: the sidecar answers with an error of its own."""

    def on_rest(self, record: Record, head: ResponseHead) -> None:
        """Another engine goes on with an answer that has begun: its own, whose head this is,
        begins."""

    def on_request_end(self, record: Record) -> None:
        """The request ended; of its legs only releases may still end later."""

    def on_release_end(self, record: Record, leg: Leg) -> None:
        """A release of the request's KV ended."""


class Failover(Protocol):
    """Finds another engine for a request whose engine failed: before the client got a byte, or in
    the middle of a stream that is kept."""

    @property
    def resumes(self) -> bool:
        """Whether the request leaves an engine that only seems to hang: the set resumes streams."""

    def try_take_over(self) -> bool:
        """Give the request and its record to another engine; returns whether one takes them. The
        caller then ends without a word to the client. If not, the engine may still go on."""

    def try_wait(self, problem: str) -> bool:
        """Keep the request until an engine can serve it, after `try_take_over` found none; returns
        whether it is kept. The caller then ends likewise. If no engine comes in time, the client
        gets the error `problem`. Only after a failure."""

    def try_move(self, again: Callable[[], None]) -> bool:
        """Likewise of a stream that is kept and whose engine did not fail, but drains. `again` is
        called where another engine has to be asked first, once it has said that it can go on."""


class Work(Protocol):
    """Something that must end before the process does."""

    def drain_expired(self) -> None:
        """The drain timeout passed: end now, with an error for the client if there is one."""

    def engine_drains(self, engine: HostPort | None) -> None:
        """A decode engine is to end soon; None: every one. If it serves this, and another engine
        can go on with it, give it to that one now."""

    def describe(self) -> dict[str, object]:
        """Ids, phase and age for `/state`; never prompt text."""


class Lifecycle:
    """The running work, and whether new work is accepted.

    A drain begins with moving the streams that other engines can go on with. What is left at the
    engines, and what needs this process, end at different times: `engines_idle` and `idle`.
    """

    def __init__(self, drain_timeout: float) -> None:
        self.draining = False
        self.timeout = drain_timeout
        """Seconds that a drain leaves to running work; a reload changes it for the next drain."""
        self.has_expired = False
        """Whether that time has passed: nothing may begin any more."""
        self.ends_with_engines = True
        """Whether engines of this process drain with it, as a sidecar's do. A router's serve on, so
        its drain moves no stream."""
        self.work: set[Work] = set()
        self.elsewhere: set[Work] = set()
        """Of `work`, the streams that only pass through: another pod generates them."""
        self._emptied = asyncio.Event()
        self._expiry: asyncio.TimerHandle | None = None

    def add(self, work: Work) -> None:
        self.work.add(work)

    def remove(self, work: Work) -> None:
        self.work.discard(work)
        self.elsewhere.discard(work)
        if len(self.work) == len(self.elsewhere):
            self._emptied.set()

    def has_moved(self, work: Work) -> None:
        """Another pod generates the rest of a stream, so that this pod's engines may end."""
        self.elsewhere.add(work)
        if len(self.work) == len(self.elsewhere):
            self._emptied.set()

    def drain(self) -> None:
        """Refuse new work, and move streams off engines that end, too; what is left gets the drain
        timeout, counted from the first call."""
        if self.draining:
            return
        self.draining = True
        self._expiry = asyncio.get_running_loop().call_later(self.timeout, self._expire)
        if not self.ends_with_engines:
            return
        # A copy: a stream that moves is other work.
        for work in list(self.work):
            work.engine_drains(None)

    async def engines_idle(self) -> None:
        """Wait until no work needs an engine of this pod; at most as long as `idle`."""
        while len(self.work) > len(self.elsewhere):
            self._emptied.clear()
            await self._emptied.wait()

    async def idle(self) -> None:
        """Wait until no work runs.

        After `drain` that is when the drain timeout has passed, at the latest, plus
        `kv_transfer_timeout` for the releases and aborted prefills of the last requests.
        """
        while self.work:
            # Cleared here and not in `add`, which runs for every request. In a loop, because work
            # may start between the event and this task's turn.
            self._emptied.clear()
            await self._emptied.wait()
        if self._expiry is not None:
            self._expiry.cancel()

    def _expire(self) -> None:
        self.has_expired = True
        # A copy: ending work changes the set. Releases that it starts have their own timeouts.
        for work in list(self.work):
            work.drain_expired()


@dataclass(slots=True)
class SidecarContext:
    """The objects that all requests of a process share."""

    settings: Settings
    """Replaced by a reload; a request keeps the settings that it began with."""
    pool: Pool
    connector: ResolvedConnector
    observer: RecordObserver
    lifecycle: Lifecycle
    breakers: Breakers
    liveness: LivenessMonitor
    transfers: TransferMonitor
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    """Asked for once, as that takes a system call."""
    overlaps: Overlaps = field(default_factory=Overlaps)
    """The prompts that engines compute for this process, by engine address and rank."""
    other_decode: Callable[[HostPort], HostPort | None] = lambda _engine: None
    """Another decode engine than the one given, which may release KV when that one cannot be
    reached; None: there is none, as in a sidecar."""
    authorization: Callable[[HostPort], Headers] = lambda _engine: []
    """The Authorization header for an engine, instead of the client's; empty: the client's."""
    vocabularies: Vocabularies = field(default_factory=Vocabularies)
    stream_readers: set[HostPort] = field(default_factory=set)
    """Decode engines whose last answer said that they can read KV while it is computed."""

    def stream_source(
        self, settings: Settings, decode: HostPort, prefill: Candidate
    ) -> StreamSource | None:
        """The engine from which `decode` reads KV that `prefill` computes meanwhile; None: after
        the prefill's answer, as one of the three cannot or may not do so, or the pod is busy."""
        concurrent = self.connector.concurrent
        if not settings.stream_kv or concurrent is None or decode not in self.stream_readers:
            return None
        if self.overlaps.under_way((prefill.address, prefill.rank)) >= STREAMS_PER_POD:
            return None
        return concurrent.stream_source(prefill.address)

    def forget_source(self, prefill: HostPort) -> None:
        """The next hand-off with the pod waits for its answer, which tells its engine anew."""
        if self.connector.concurrent is not None:
            self.connector.concurrent.forget_source(prefill)


class GenerationRequest(msgspec.Struct, frozen=True):
    """A parsed request that generates text."""

    request: Request
    request_id: str
    kind: RequestKind
    body: Body
    route: Route
    record: Record
    settings: Settings
    """The settings in force when the request began."""
    keys: Mapping[str, bytes]
    """The plan keys of that time; empty: none."""
    failover: Failover | None = None
    """None: no other engine may serve it."""
    kept: KeptStream | None = None
    """The stream, if another engine can continue it; None: it ends with its engine."""

    def may_exhaust(self) -> bool:
        """Whether the prompt's text is so long that it may hang an engine. Reads the body."""
        data, members = self.body.data, self.body.members
        return len(data) > EXHAUSTING and prompt_text(self.kind, members).total > EXHAUSTING

    @property
    def prefill_timeout(self) -> float:
        """Seconds for all prefill attempts: those of the plan, else those of the settings."""
        stated = self.route.timeouts.prefill
        return self.settings.prefill_timeout if stated is None else stated

    @property
    def kv_transfer_timeout(self) -> float:
        """Seconds for a KV transfer or a release: those of the plan, else those of the settings."""
        stated = self.route.timeouts.kv_transfer
        return self.settings.kv_transfer_timeout if stated is None else stated
