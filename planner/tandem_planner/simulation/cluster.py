"""Requests on the pods of one deployment, co-located or split, from first arrival to last token.

    outcomes = colocated(requests, pods)
    outcomes = split(requests, prefills, decodes, handoff=0.01)

A prompt goes to the pod where the fewest tokens are to be computed until its first token, its own
included: prefixes that a pod has cached draw alike prompts. An answer goes to the pod whose answers
have the fewest tokens; where pods do both, a token of an answer counts as ANSWER_SHARE of one that
is to be computed. Prefill pods do not depend on decode pods, so they are simulated first, and the
decode pods with what they made: exact, but for prompts' KV, which takes no room on a prefill pod
once the prompt is computed.

Pure and deterministic: the same requests and pods give the same outcomes, bit by bit.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from .engine import Engine
from .work import Change, Work

ANSWER_SHARE: Final = 0.02
"""Of a prompt's token: about what a decode's share of a step takes beside a prefill's."""
_END: Final = 1e12
"""Seconds: later than any request ends."""


class Request(NamedTuple):
    """A request of a workload; lengths in tokens."""

    at: float
    """Seconds."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of the prompt's whole blocks of `block_pool.BLOCK` tokens; equal ids, equal prefix."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the client of a request saw. Seconds."""

    request: Request
    first_token: float
    """When it came."""
    ended: float
    hit_tokens: int
    """Prompt tokens that were in a cache."""

    @property
    def ttft(self) -> float:
        """Until the first token."""
        return self.first_token - self.request.at

    @property
    def itl(self) -> float | None:
        """Mean between two tokens; None for an answer of one token."""
        if self.request.output_tokens < 2:
            return None
        return (self.ended - self.first_token) / (self.request.output_tokens - 1)

    def delayed(self, seconds: float) -> "Outcome":
        """The same, seen so much later."""
        return replace(self, first_token=self.first_token + seconds, ended=self.ended + seconds)

    @property
    def e2e(self) -> float:
        """Until the last token."""
        return self.ended - self.request.at


def colocated(requests: Sequence[Request], pods: Sequence[Engine]) -> list[Outcome]:
    """Pods that compute prompts and answers; `requests` in order of time."""
    works = [_work(i, request, request.at) for i, request in enumerate(requests)]
    _run(works, pods, _Loads(pods, prompts=True, answers=ANSWER_SHARE))
    return [_outcome(request, work, work) for request, work in zip(requests, works, strict=True)]


def split(
    requests: Sequence[Request],
    prefills: Sequence[Engine],
    decodes: Sequence[Engine],
    *,
    handoff: float,
) -> list[Outcome]:
    """Pods that compute prompts, and pods that answer. `handoff`: seconds of a hand-off beside its
    transfer, which is the `link`'s of the decode pods."""
    prompts = [_work(i, request, request.at) for i, request in enumerate(requests)]
    for prompt in prompts:
        prompt.output_tokens = 1
    _run(prompts, prefills, _Loads(prefills, prompts=True, answers=0.0))
    answers = []
    for prompt, request in zip(prompts, requests, strict=True):
        computed, started = _done(prompt.first_token), _done(prompt.started)
        answer = _work(prompt.index, request, computed + handoff)
        answer.is_remote, answer.prefill_seconds = True, computed - started
        answers.append(answer)
    loads = _Loads(decodes, prompts=False, answers=1.0)
    _run(sorted(answers, key=lambda answer: answer.arrived), decodes, loads)
    return [_outcome(*each) for each in zip(requests, answers, prompts, strict=True)]


def answered(requests: Sequence[Request], pods: Sequence[Engine]) -> list[Outcome]:
    """Pods that answer requests whose prompts other pods have computed, at the requests' times."""
    works = [_work(i, request, request.at) for i, request in enumerate(requests)]
    for work in works:
        work.is_remote = True
    _run(works, pods, _Loads(pods, prompts=False, answers=1.0))
    return [_outcome(request, work, work) for request, work in zip(requests, works, strict=True)]


class _Loads:
    """What the pods have to do, in tokens."""

    def __init__(self, pods: Sequence[Engine], *, prompts: bool, answers: float) -> None:
        """`prompts`: whether the pods compute prompts; `answers`: what a token of one counts."""
        self.tokens = [0.0] * len(pods)
        self._pods, self._prompts, self._answers = pods, prompts, answers
        self._placed: dict[int, float] = {}
        """Request → its tokens to be computed."""

    def place(self, work: Work) -> int:
        """Choose a pod for `work`."""
        if not self._prompts:
            pod = self.tokens.index(min(self.tokens))
        elif not work.blocks:
            pod = self.tokens.index(min(self.tokens))
            self._placed[work.index] = work.prompt_tokens
        else:
            own = [work.prompt_tokens - pod.tokens_in_turn(work) for pod in self._pods]
            costs = [load + tokens for load, tokens in zip(self.tokens, own, strict=True)]
            pod = costs.index(min(costs))
            self._placed[work.index] = own[pod]
        self.tokens[pod] += self._placed.get(work.index, 0.0) + self._answer(work)
        return pod

    def change(self, pod: int, change: Change) -> None:
        """A request on `pod` has its first token, or has ended."""
        if change.is_end:
            self.tokens[pod] -= self._answer(change.work)
        else:
            self.tokens[pod] -= self._placed.pop(change.work.index, 0.0)

    def _answer(self, work: Work) -> float:
        return self._answers * (work.prompt_tokens + work.output_tokens)


def _run(works: Iterable[Work], pods: Sequence[Engine], loads: _Loads) -> None:
    """Place `works`, in order of time, on the pods that have the least load then."""
    quiet_until = [_END] * len(pods)

    def advance(pod: int, until: float) -> None:
        for change in pods[pod].advance(until):
            loads.change(pod, change)
        quiet_until[pod] = pods[pod].quiet_until()

    for work in works:
        # Long runs of equal steps are computed at once: only what may end by now is looked at.
        for pod, end in enumerate(quiet_until):
            if end <= work.arrived:
                advance(pod, work.arrived)
        pod = loads.place(work)
        advance(pod, work.arrived)
        pods[pod].add(work)
        quiet_until[pod] = work.arrived
    for pod in range(len(pods)):
        advance(pod, _END)


def _work(index: int, request: Request, at: float) -> Work:
    return Work(index, at, request.prompt_tokens, request.output_tokens, request.blocks)


def _outcome(request: Request, answer: Work, prompt: Work) -> Outcome:
    return Outcome(request, _done(answer.first_token), _done(answer.ended), prompt.hit_tokens)


def _done(time: float | None) -> float:
    if time is None:
        raise ValueError("a request did not end")
    return time
