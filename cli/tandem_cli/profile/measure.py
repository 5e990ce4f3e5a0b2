"""The measurements of a profile, each a few requests to a server without other clients.

Prompts are random token ids, so that no prefix cache has any of them.

Errors: `ProfileError`: a request failed; the message says why.
"""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean, median
from typing import Final

from tandem_loadtest.calls import Call, Result
from tandem_loadtest.client import Client
from tandem_planner.simulation.engine import Batching, Engine
from tandem_planner.simulation.loop import AT_ONCE, simulate
from tandem_planner.simulation.measures import Outcome, percentile
from tandem_planner.simulation.routers import RoundRobin
from tandem_planner.simulation.work import Request
from tandem_planner.sizing.profile import DecodePoint, FittedEngine, PrefillPoint

from .file import HeldOut, ProfileError

_FIRST_ID: Final = 10
"""Smaller ids are often special."""
_IDS: Final = 240
"""Ids that any vocabulary has."""
_ANSWER: Final = 48
"""Tokens of an answer whose gaps are measured."""
_LOAD: Final = 0.5
"""Of the capacity, in the load that is held out."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What the client saw of a request, in seconds."""

    ttft: float
    itl: float | None


class Prober:
    """Sends the requests of a profile."""

    def __init__(self, client: Client, seed: int = 0) -> None:
        self._client, self._random = client, Random(seed)

    async def warm_up(self, longest: int) -> None:
        """Compilations and first allocations: what a server does once."""
        for tokens in (16, 16, longest):
            await self._answer(tokens, 8)

    async def prefill(self, tokens: int) -> PrefillPoint:
        """One prompt alone."""
        measured = await self._answer(tokens, 1)
        return PrefillPoint(tokens, measured.ttft)

    async def decode(self, decodes: int, prompt: int) -> DecodePoint:
        """Alike answers together: the middle half of their gaps, when all prompts are computed."""
        results = await asyncio.gather(
            *(self._send(prompt, _ANSWER + 2 * decodes) for _ in range(decodes))
        )
        begun = max(result.first_token or result.ended or 0.0 for result in results)
        gaps = [gap for result in results for gap in _gaps_after(result, begun)]
        if not gaps:
            raise ProfileError(f"{decodes} answers of a prompt of {prompt} tokens do not overlap")
        context = prompt + fmean(len(result.gaps) + 1 for result in results) / 2
        return DecodePoint(decodes, context, median(gaps))

    async def held_out(self, engine: FittedEngine, batching: Batching, seconds: float) -> HeldOut:
        """A Poisson load of unequal requests, measured and simulated."""
        requests = self._load(engine, seconds)
        measured = await self._measure(requests)
        pod = Engine(engine.step, cache_tokens=10**9, seed=0, batching=batching, noise=0.0)
        served = simulate(requests, [pod], RoundRobin([pod], 0), timing=AT_ONCE).served
        pairs = (
            ([each.ttft + engine.request for each in served], [each.ttft for each in measured]),
            (_itls(served), _itls(measured)),
        )
        return HeldOut(
            len(requests),
            *(
                percentile(simulated, percent) / percentile(real, percent) - 1.0
                for simulated, real in pairs
                for percent in (50, 99)
            ),
        )

    def _load(self, engine: FittedEngine, seconds: float) -> list[Request]:
        random, step = self._random, engine.step
        most = max(32, engine.longest_prompt // 2)
        prompt, output = most / 2, float(_ANSWER)
        decodes = max(1, engine.most_decodes // 2)
        gap = step.seconds(decodes, decodes * (prompt + output))
        service = step.seconds(0, 0, prompt, prompt**2) + output * gap / decodes
        at, requests = 0.0, list[Request]()
        while (at := at + random.expovariate(_LOAD / service)) < seconds or len(requests) < 20:
            lengths = random.randrange(16, most), random.randrange(8, 2 * _ANSWER)
            requests.append(Request(at, *lengths))
        return requests

    async def _measure(self, requests: Sequence[Request]) -> list[Measured]:
        loop = asyncio.get_running_loop()
        begin = loop.time()

        async def one(request: Request) -> Measured:
            await asyncio.sleep(begin + request.at - loop.time())
            return await self._answer(request.prompt_tokens, request.output_tokens)

        return await asyncio.gather(*map(one, requests))

    async def _answer(self, prompt: int, output: int) -> Measured:
        result = await self._send(prompt, output)
        sent, ended = result.sent or 0.0, result.ended or 0.0
        # A token whose text is empty shows only at the end of its answer.
        first, last = result.first_token or ended, result.last_token or ended
        return Measured(first - sent, (last - first) / (output - 1) if output > 1 else None)

    async def _send(self, prompt: int, output: int) -> Result:
        ids = tuple(_FIRST_ID + self._random.randrange(_IDS) for _ in range(prompt))
        result = await self._client.send(Call(ids, output, ignore_eos=True))
        if not result.ok:
            raise ProfileError(f"a prompt of {prompt} tokens failed: {result.error}")
        return result


def _itls(requests: Iterable[Outcome | Measured]) -> list[float]:
    return [itl for request in requests if (itl := request.itl) is not None]


def _gaps_after(result: Result, begin: float) -> list[float]:
    """The gaps of an answer from `begin` on."""
    at, gaps = result.first_token or 0.0, list[float]()
    for gap in result.gaps:
        if at >= begin:
            gaps.append(gap)
        at += gap
    return gaps
