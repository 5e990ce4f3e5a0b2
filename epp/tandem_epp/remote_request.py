"""A request that another replica placed, on its pods: counted as `placement` counts an own one."""

from dataclasses import replace
from typing import Final

import msgspec

from tandem_contract.timing import parse_timing

from .backends.fleet import Fleet
from .backends.pods import Pod
from .estimates.request_load import PlacedPrompt, RequestLoad
from .ext_proc.messages import ResponseHeaders
from .peers.frames import RequestStarted, unpack
from .prompt_entries import PromptEntries
from .verdicts import PlacedPods

_size: Final = msgspec.msgpack.Decoder(PlacedPrompt)


class RemoteRequest:
    """Takes its counts at the start and returns each exactly once, in whatever order answer and end
    are told. It holds Pods, not names: a pod that left the fleet is still decremented."""

    def __init__(self, started: RequestStarted, decode: Pod, fleet: Fleet, now: float) -> None:
        """`now` is Unix seconds. Prefill pods that this replica does not know are left out."""
        self._fleet, self._decode = fleet, decode
        found = (fleet.find(name) for name in started.prefill)
        prefill = [pod for pod in found if pod is not None]
        self._prefill = prefill[0] if prefill and not started.status else None
        """The prefill pod on which the request counts; None once that count is returned."""
        _count(decode, 1)
        if self._prefill is not None:
            _count(self._prefill, 1)
        self._pods = PlacedPods(
            decode,
            prefill,
            now - started.age,
            decode.counters.generated_tokens,
            started.can_fall_back,
            is_own=False,
        )
        self._entries = PromptEntries(fleet.prefixes, unpack(started.chain), decode, prefill)
        self._candidates = prefill
        size = _size.decode(started.size)
        if started.status:
            # When its first token came is not known: nothing is learned from it.
            size = replace(size, is_stream=False)
        computing = prefill[0].estimates if prefill else None
        self._load = RequestLoad(decode.estimates, computing, size, now - started.age)
        self._is_judged = bool(started.status)
        """Whether the outcome is counted: of a request in a snapshot, the peer has counted it."""
        if started.status:
            self._entries.on_response_headers(ResponseHeaders(None, started.status))
            self._respond(ResponseHeaders(None, started.status), now)
        else:
            self._pods.start(fleet)

    def on_answered(self, response: ResponseHeaders, now: float) -> None:
        """The response headers passed: the prefill is over."""
        self._end_prefill()
        self._correct_decode(response.served)
        if not self._is_judged:
            self._is_judged = True
            self._pods.judge_response(self._fleet, response, now)
        self._entries.on_response_headers(response)
        self._respond(response, now)

    def _respond(self, response: ResponseHeaders, now: float) -> None:
        if response.status // 100 != 2:
            self._load.end(now)
            return
        report = parse_timing(response.timing or "")
        names = (response.prefill,)
        computing = next(
            (pod for pod in self._candidates if pod.name in names or pod.address in names),
            self._decode,
        )
        self._load.on_response(now, report, computing.estimates)

    def end(self, now: float) -> None:
        """The request ended: return the counts that are left."""
        if not self._is_judged:
            self._is_judged = True
            self._pods.judge_silence(self._fleet, now)
        self.drop(now)

    def drop(self, now: float) -> None:
        """Return the counts that are left, without an outcome. At most once."""
        self._end_prefill()
        _count(self._decode, -1)
        # Without effect on entries that were confirmed.
        self._entries.withdraw()
        self._load.end(now)

    def _end_prefill(self) -> None:
        if self._prefill is not None:
            _count(self._prefill, -1)
            self._prefill = None

    def _correct_decode(self, served: str | None) -> None:
        """As `Placement` does."""
        if served is None or served == self._decode.address:
            return
        pod = next((pod for pod in self._fleet if pod.address == served), None)
        if pod is not None:
            _count(self._decode, -1)
            _count(pod, 1)
            self._decode = pod
            self._pods = replace(self._pods, decode=pod)
            self._entries.move_decode(pod)
            self._load.move_decode(pod.estimates)


def _count(pod: Pod, requests: int) -> None:
    pod.in_flight += requests
    pod.remote_in_flight += requests
