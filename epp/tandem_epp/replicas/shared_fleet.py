"""What the replicas of an EPP know together: tells what this one places, applies what others tell.

`SharedFleet` observes this replica's placements and publishes them; it applies those of others to
the `Fleet` through `CountedRequest`, so that the scheduler sees one fleet. It does no I/O: the
publisher is the `peers.channel`.

An access log may speak of `RecentRequests` alone: any client of the gRPC port can send log entries.
An entry counts only if it names the id of a request that this replica placed, and the backend that
served it; and once per request.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from itertools import count
from math import isfinite
from time import time
from typing import Final, Protocol

import msgspec

from tandem_contract.timing import parse_timing

from ..backends.adapters import AdapterSlots
from ..backends.fleet import Fleet
from ..backends.health import OutcomeCounts
from ..backends.pods import Pod
from ..estimates.request_load import PlacedPrompt
from ..estimates.shared_samples import add_samples, most_samples, samples_of
from ..exchange import BrokenAnswer, ResponseHeaders
from ..flow.elsewhere import Group, Share, WaitingElsewhere, Went
from ..placement.counted_request import CountedRequest
from ..placement.placement import Placement
from ..placement.verdicts import judge_broken
from .peers.frames import (
    AdaptersLoaded,
    AnswerBroke,
    BrokenLogged,
    Event,
    FirstTokensTook,
    PodEjected,
    PodFailed,
    PodLearned,
    PrefixCached,
    RequestAnswered,
    RequestEnded,
    RequestStarted,
    RequestsWait,
    TextsCounted,
    pack,
    unpack,
)

MAX_ENDED: Final = 10_000
"""Requests that are remembered after their end: Envoy sends its log up to a second later. About
200 bytes each. Too low: broken answers of a busy replica do not count."""


class RecentRequests:
    """The requests that this replica placed: those that run, and the latest that ended."""

    def __init__(self, most: int = MAX_ENDED) -> None:
        self._most = most
        self._running: dict[str, Placement] = {}
        # An OrderedDict: in a dict the first key is found behind all those that were deleted.
        self._ended: OrderedDict[str, tuple[str | None, float]] = OrderedDict()
        """Id → address of the decode pod, and when the request was placed; the oldest first."""

    def start(self, placement: Placement) -> None:
        """A request was placed."""
        self._running[placement.decision.request_id] = placement

    def end(self, placement: Placement) -> None:
        """Its stream ended."""
        name = placement.decision.request_id
        # Absent if its answer has been taken; another one if a client used the id twice.
        if self._running.get(name) is not placement:
            return
        del self._running[name]
        if name in self._ended:
            del self._ended[name]
        if placement.pods.has_failed:
            # Its failure has been counted.
            return
        self._ended[name] = _served(placement)
        if len(self._ended) > self._most:
            self._ended.popitem(last=False)

    def take(self, request_id: str, backend: str) -> float | None:
        """When the request was placed, Unix seconds, if `backend` (`ip:port`) serves or served it.
        Asked again, None: each request counts once."""
        running = self._running.get(request_id)
        served = _served(running) if running is not None else self._ended.get(request_id)
        if served is None or served[0] != backend:
            return None
        if running is not None:
            running.pods.has_failed = True
        self._running.pop(request_id, None)
        self._ended.pop(request_id, None)
        return served[1]


def _served(placement: Placement) -> tuple[str | None, float]:
    return placement.decode.address, placement.decision.decided_at


_size: Final = msgspec.msgpack.Decoder(PlacedPrompt)
_response: Final = msgspec.msgpack.Decoder(ResponseHeaders)
SNAPSHOT_BYTES: Final = 4 << 20
"""Bytes of prefix chains in a snapshot; beyond them requests come without their chains, and cached
prefixes not at all. What else is in it grows with the requests under way and with the pods."""
MAX_UNKNOWN: Final = 1000
"""Names of unknown pods that are remembered of one peer. A pod beyond them gets no snapshot when it
is discovered."""
MAX_MODEL: Final = 256
"""Characters of the name of a model that are sent at most: clients choose it where no backend lists
its models."""


class Publisher(Protocol):
    """Sends events to the other replicas."""

    @property
    def has_peers(self) -> bool:
        """Whether a replica is connected."""

    @property
    def rank(self) -> tuple[int, int]:
        """This replica's place among those that are connected and itself, and their number: the
        same order for all of them."""

    @property
    def replicas(self) -> int:
        """Replicas that there are, as far as is known: this one, and those that it connects to or
        tries to."""

    def publish(self, event: Event) -> None:
        """Send `event` to all connected replicas; never waits."""


class SharedFleet:
    """The part of the fleet's state that replicas share."""

    def __init__(
        self,
        fleet: Fleet,
        clock: Callable[[], float] = time,
        waiting: WaitingElsewhere | None = None,
    ) -> None:
        """`clock` returns Unix seconds. `waiting`: what waits in flow control; None: nothing."""
        self._waiting = waiting or WaitingElsewhere()
        self._waiting.on_change = self._on_waiting
        self._waiting.part = self._part
        self.publisher: Publisher | None = None
        """None: events go nowhere."""
        self._fleet, self._clock = fleet, clock
        self._is_leaving = False
        fleet.ejections.on_ejected = self._on_ejected
        self._numbers = count(1)
        self._own: dict[int, Placement] = {}
        """Number → placement of this replica that has not ended."""
        self._recent = RecentRequests()
        self._remote: defaultdict[str, dict[int, CountedRequest]] = defaultdict(dict)
        """Peer → number → its request that has not ended."""
        self._unknown: defaultdict[str, set[str]] = defaultdict(set)
        """Peer → pods that it told of and that this replica did not know."""

    def leave(self) -> None:
        """This replica stops. Its streams end, and their requests run on without it: from now on no
        end is told, so the others count these requests until they forget this replica."""
        self._is_leaving = True

    # What this replica does: `placement.placement.PlacementObserver`.

    def on_started(self, placement: Placement) -> None:
        placement.number = next(self._numbers)
        self._own[placement.number] = placement
        self._recent.start(placement)
        contention = self._fleet.figures.contention
        if (publisher := self._publisher()) is not None:
            contention.rank, contention.replicas = publisher.rank
            contention.place(placement.decision.decided_at)
            publisher.publish(_started(placement, placement.decision.decided_at, SNAPSHOT_BYTES))
        else:
            contention.replicas = 1

    def on_answered(self, placement: Placement, response: ResponseHeaders) -> None:
        if (publisher := self._publisher()) is not None:
            publisher.publish(_answered(placement, response))

    def on_ended(self, placement: Placement) -> None:
        del self._own[placement.number]
        self._recent.end(placement)
        if not self._is_leaving and (publisher := self._publisher()) is not None:
            publisher.publish(RequestEnded(placement.number))

    def _on_waiting(self, group: Group, share: Share, went: Went | None) -> None:
        """`share` of `group` waits here now, after `went` has gone."""
        if (publisher := self._publisher()) is not None and len(group.model or "") <= MAX_MODEL:
            publisher.publish(_wait(group, share, went))

    def _part(self) -> float:
        """The part of all replicas that this one hears of, itself included."""
        if self.publisher is None:
            return 1.0
        # What a replica told that was connected until just now still counts.
        known = max(self.publisher.rank[1], self._waiting.replicas)
        return known / max(known, self.publisher.replicas)

    def on_broken(self, broken: BrokenAnswer, now: float) -> None:
        """An Envoy that logs here reports a broken answer, perhaps of another replica's request:
        each Envoy logs to one replica."""
        logged = BrokenLogged(broken.request_id, broken.backend, broken.ending)
        if not self._count_broken(logged, now) and (publisher := self._publisher()):
            publisher.publish(logged)

    def _count_broken(self, logged: BrokenLogged, now: float) -> bool:
        """Count a broken answer if this replica placed the request on `backend`; returns whether
        it did."""
        backend = logged.backend
        placed = self._recent.take(logged.request_id, backend)
        if placed is None:
            return False
        judge_broken(self._fleet, BrokenAnswer(backend, placed, ending=logged.ending), now)
        if (publisher := self._publisher()) is not None:
            publisher.publish(AnswerBroke(backend, max(0.0, now - placed), logged.ending))
        return True

    def _on_ejected(self, pod: Pod, now: float) -> None:
        # Others have counted the same failures, unless they joined lately.
        if (publisher := self._publisher()) is not None:
            publisher.publish(PodEjected(pod.name, max(0.0, pod.health.until - now)))

    def _publisher(self) -> Publisher | None:
        # Without peers no event is made: the chains of long prompts take time.
        return self.publisher if self.publisher is not None and self.publisher.has_peers else None

    # What others do: `replicas.peers.channel.Knowledge`.

    def snapshot(self) -> Iterator[Event]:
        """The requests of this replica that have not ended, the newest first; what failed, which
        pods are ejected, what requests take, and which adapters are loaded; and what pods cache, as
        far as SNAPSHOT_BYTES go."""
        now, left = self._clock(), SNAPSHOT_BYTES
        for placement in reversed(self._own.values()):
            started = _started(placement, now, left)
            left -= len(started.chain)
            yield started
        most = most_samples(len(self._fleet))
        for pod in self._fleet:
            if (counts := pod.health.counts(now)) is not None:
                yield PodFailed(pod.name, *counts)
            if pod.health.is_ejected:
                yield PodEjected(pod.name, max(0.0, pod.health.until - now))
            samples = samples_of(pod.estimates, most)
            if samples or pod.token_scale != 1.0:
                yield PodLearned(pod.name, samples, pod.token_scale)
            if adapters := pod.adapters.resident:
                yield AdaptersLoaded(pod.name, adapters)
        yield from self._of_all_pods(now)
        # The oldest first, as they were learned: the receiver forgets in that order.
        yield from reversed(self._recent_prefixes(left))

    def _of_all_pods(self, now: float) -> Iterator[Event]:
        """What a snapshot has of all pods together."""
        for model, assumed, counted in self._fleet.token_scales.sums:
            if len(model or "") <= MAX_MODEL:
                yield TextsCounted(model or "", assumed, counted)
        for path, seconds, at in self._fleet.overheads.latest:
            yield FirstTokensTook(path, seconds, max(0.0, now - at))
        for group, share in self._waiting.own.items():
            if len(group.model or "") <= MAX_MODEL:
                yield _wait(group, share)

    def _recent_prefixes(self, limit: int) -> list[PrefixCached]:
        """The most recently used prompts of the pods, up to `limit` bytes."""
        prefixes = []
        for pod, chain in self._fleet.prefixes.recent():
            event = PrefixCached(pod.name, pack(chain))
            limit -= len(event.chain)
            if limit < 0:
                break
            prefixes.append(event)
        return prefixes

    def lacks_snapshot(self, peer: str) -> bool:
        return any(self._fleet.find(name) is not None for name in self._unknown[peer])

    def reset(self, peer: str) -> None:
        self._unknown.pop(peer, None)
        self._waiting.forget(peer)
        for request in self._remote.pop(peer, {}).values():
            request.drop(self._clock())

    def apply(self, peer: str, event: Event) -> None:
        requests, now = self._remote[peer], self._clock()
        match event:
            case RequestStarted():
                self._fleet.figures.contention.follow(now)
                self._start(peer, event, now)
            case RequestAnswered() if event.request in requests:
                response = _response.decode(event.response)
                report = parse_timing(response.timing or "")
                requests[event.request].on_response_headers(response, now, report)
                self._fleet.overheads.learn(event.path, event.beyond, now)
            case RequestEnded() if event.request in requests:
                requests.pop(event.request).end(now)
            case AnswerBroke(backend, age, ending):
                broken = BrokenAnswer(backend, now - age, ending=ending)
                judge_broken(self._fleet, broken, now, is_own=False)
            case RequestsWait():
                self._learn_waiting(peer, event)
            case BrokenLogged():
                self._count_broken(event, now)
            case PodEjected() | PodLearned() | PodFailed() | PrefixCached() | AdaptersLoaded():
                if (pod := self._find(peer, event.pod)) is not None:
                    _learn(self._fleet, pod, event, now)
            case FirstTokensTook() | TextsCounted():
                _learn_of_all(self._fleet, event, now)
            case _:
                # About a request that this replica does not know.
                pass

    def _learn_waiting(self, peer: str, event: RequestsWait) -> None:
        if isfinite(event.turn) and isfinite(event.tokens):
            group = Group(event.model or None, event.priority, event.is_split)
            share = Share(max(0, event.requests), max(0, event.size), event.turn)
            went = Went(event.tenant, event.tokens) if event.tokens > 0.0 else None
            self._waiting.learn(peer, group, share, went)

    def _find(self, peer: str, name: str) -> Pod | None:
        """The pod of this name; if this replica does not know it yet, it needs a snapshot of `peer`
        when it does."""
        pod = self._fleet.find(name)
        if pod is None and len(self._unknown[peer]) < MAX_UNKNOWN:
            self._unknown[peer].add(name)
        return pod

    def _start(self, peer: str, event: RequestStarted, now: float) -> None:
        requests = self._remote[peer]
        # A peer does not use a number twice; if it does, no count is lost.
        if (previous := requests.pop(event.request, None)) is not None:
            previous.drop(now)
        for name in event.prefill:
            self._find(peer, name)
        if (decode := self._find(peer, event.decode)) is not None:
            requests[event.request] = _counted(event, decode, self._fleet, now)


_OfPod = PodEjected | PodLearned | PodFailed | PrefixCached | AdaptersLoaded


def _learn(fleet: Fleet, pod: Pod, event: _OfPod, now: float) -> None:
    """Take in what a peer knows of a pod."""
    match event:
        case PodEjected(_, seconds):
            fleet.ejections.adopt(pod, now, now + seconds)
        case PodFailed():
            _, *counts = msgspec.structs.astuple(event)
            fleet.ejections.take_over(pod, OutcomeCounts(*counts), now)
        case PodLearned(_, samples, token_scale):
            add_samples(pod.estimates, samples, now)
            if pod.token_scale == 1.0:
                pod.token_scale = token_scale
        case AdaptersLoaded(_, adapters):
            fleet.learn_adapters(AdapterSlots(running=frozenset(adapters)))
            pod.adapters.take_over(adapters)
        case PrefixCached(_, chain):
            fleet.prefixes.confirm(fleet.prefixes.place(pod, unpack(chain)))


def _learn_of_all(fleet: Fleet, event: FirstTokensTook | TextsCounted, now: float) -> None:
    """Take in what a peer knows of all pods together."""
    match event:
        case FirstTokensTook(path, seconds, age):
            fleet.overheads.take_over(path, seconds, now - age)
        case TextsCounted(model, assumed, counted):
            fleet.token_scales.take_over(model or None, assumed, counted)


def _counted(event: RequestStarted, decode: Pod, fleet: Fleet, now: float) -> CountedRequest:
    """A peer's request on its pods; prefill pods that this replica does not know are left out."""
    prefill = [pod for name in event.prefill if (pod := fleet.find(name)) is not None]
    size = _size.decode(event.size)
    if event.status:
        # When its first token came is not known: nothing is learned from it.
        size = msgspec.structs.replace(size, is_stream=False)
    request = CountedRequest(
        fleet,
        decode,
        prefill,
        now - event.age,
        size,
        unpack(event.chain),
        event.model or None,
        event.assumed_tokens,
        event.can_fall_back,
        is_own=False,
        fingerprint=event.fingerprint,
        # The outcome of a request in a snapshot is counted by the peer.
        is_judged=bool(event.status),
    )
    if event.status:
        request.on_response_headers(ResponseHeaders(None, event.status), now)
    return request


def _started(placement: Placement, now: float, chain_bytes: int) -> RequestStarted:
    """The event for a placement that has not ended; its chain only if it has at most `chain_bytes`
    bytes."""
    decision, pods = placement.decision, placement.pods
    chain, model = pack(pods.chain), pods.model or ""
    return RequestStarted(
        request=placement.number,
        decode=pods.decode.name,
        prefill=tuple(pod.name for pod in pods.prefill),
        size=msgspec.Raw(msgspec.msgpack.encode(pods.size)),
        status=decision.status or 0,
        can_fall_back=pods.can_fall_back,
        age=max(0.0, now - decision.decided_at),
        chain=chain if len(chain) <= chain_bytes else b"",
        model=model if len(model) <= MAX_MODEL else "",
        # Of what has media, the replica that placed it learns.
        assumed_tokens=0 if pods.media_parts else pods.assumed_tokens,
        fingerprint=pods.fingerprint,
    )


def _wait(group: Group, share: Share, went: Went | None = None) -> RequestsWait:
    sent = went or Went("", 0.0)
    return RequestsWait(group.model or "", group.priority, group.is_split, *share, *sent)


def _answered(placement: Placement, response: ResponseHeaders) -> RequestAnswered:
    number, encoded = placement.number, encode_response(response)
    if (beyond := placement.beyond) is None:
        return RequestAnswered(number, encoded)
    return RequestAnswered(number, encoded, placement.decision.path or "", beyond)


def encode_response(response: ResponseHeaders) -> msgspec.Raw:
    """The response as `RequestAnswered` holds it."""
    return msgspec.Raw(msgspec.msgpack.encode(response))
