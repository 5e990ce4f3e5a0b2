"""What an EPP behind Envoy learns of a real engine, beside the engine's own prefill times.

    learned = await learn(directory, engine, backends, requests, repeats=5)
    learned.check()

The truth is `vllm:request_prefill_time_seconds`, one request at a time, without hits: the median of
several prompts of the same length, sent after the EPP learned. `check` does not compare with it,
since other work may have changed the machine's speed meanwhile, but with a fit of the engine's own
times of the requests from which the EPP learned.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import aiohttp
import msgspec

from tandem_contract import endpoints, headers, metrics
from tandem_contract.pod_reports import Estimate, PodReport, Source
from tandem_operator.routing.envoy.clusters import Json
from tandem_planner.prefill_fit import PrefillCost, PrefillFit, prefill_sample

from ..sidecar.real.page import figure, figures
from .real import Epp, envoy, envoy_settings, epp, until

ENGINE: Final = "engine"
"""Name of the backend whose engine computes all prompts."""
REQUESTS: Final = 50
SHORTEST, LONGEST = 200, 3500
"""Tokens of a prompt."""
LIMIT: Final = 0.15
"""Largest median error of the prediction, relative to the engine's own time."""
LENGTHS: Final = 8
"""Lengths of prompts at which the truth is measured."""


@dataclass(frozen=True)
class Requests:
    """What is sent."""

    model: str
    is_stream: bool = False
    has_timing: bool = True
    """Whether the EPP sees the header `x-tandem-timing` of answers that have it."""
    plugins: Sequence[str] = ()
    """Types of the EPP's plugins; empty: the cost."""

    def body(self, length: int, number: int) -> dict[str, Any]:
        """A prompt whose first block no other has."""
        random = Random(f"{number} {self}")
        prompt = [random.randrange(4, 200) for _ in range(length)]
        return {"model": self.model, "prompt": prompt, "max_tokens": 2, "stream": self.is_stream}


@dataclass(frozen=True)
class Learned:
    """What the EPP has learned of an engine, and the engine's own times."""

    estimate: Estimate
    """After REQUESTS requests."""
    requests: list[tuple[int, float]]
    """Tokens and seconds of each of them."""
    repeated: Mapping[int, Sequence[float]]
    """Tokens → seconds of each of the prompts of this length that were sent afterwards."""

    @property
    def truth(self) -> dict[int, float]:
        """Tokens → median seconds, at the speed that the machine had while the EPP learned: other
        work makes shared cores up to twice as slow, for a moment or for minutes."""
        return {length: self._slowdown * median(times) for length, times in self.repeated.items()}

    @property
    def noise(self) -> float:
        """Median relative distance of the times from which the EPP learned, from the truth."""
        return median(abs(ratio / self._slowdown - 1) for ratio in self._ratios)

    @property
    def reference(self) -> PrefillCost:
        """What a fit of the engine's own times of the same requests says."""
        fit, now = PrefillFit(), 0.0
        for length, seconds in self.requests:
            now += seconds
            fit.add(prefill_sample([(length, 0)], seconds), now)
        return fit.cost

    @property
    def scatter(self) -> float:
        """Median relative distance of the engine's own times from their fit."""
        cost = self.reference
        return median(abs(seconds / cost.seconds(n) - 1) for n, seconds in self.requests)

    @property
    def apart(self) -> float:
        """Median relative distance of the estimate from a fit of the engine's own times."""
        return self.error({length: self.reference.seconds(length) for length in self.repeated})

    @property
    def _slowdown(self) -> float:
        return median(self._ratios)

    @property
    def _ratios(self) -> list[float]:
        """The times of the requests, over a fit of those that were measured afterwards."""
        fit = PrefillFit()
        fit.end_cold_start()
        for length, times in self.repeated.items():
            fit.add(prefill_sample([(length, 0)], median(times)), 0.0)
        return [seconds / fit.cost.seconds(length) for length, seconds in self.requests]

    @property
    def cost(self) -> PrefillCost:
        """The EPP's estimate."""
        names = ("seconds_per_request", "seconds_per_token", "seconds_per_pair")
        return PrefillCost(*(self.estimate.figures[name] for name in names))

    def error(self, truth: Mapping[int, float]) -> float:
        """Median relative error of the estimate."""
        return median(abs(self.cost.seconds(n) / seconds - 1) for n, seconds in truth.items())

    def __str__(self) -> str:
        return (
            f"{len(self.requests)} prefills, {self.estimate.samples} samples: the EPP errs by "
            f"{self.error(self.truth):.1%} (median of {len(self.truth)} lengths); the times from "
            f"which it learned differ from the truth by {self.noise:.1%}, from a fit of them by "
            f"{self.scatter:.1%}, and the EPP from that fit by {self.apart:.1%}"
        )

    def check(self) -> None:
        """Fail unless the EPP has learned what a fit of the engine's own times says: within LIMIT,
        or within the scatter of these times, about four standard errors of a fit of 50."""
        print(f"\n{self}")
        assert self.estimate.source is Source.LEARNED
        assert self.estimate.age is not None
        assert self.apart <= max(LIMIT, self.scatter)


async def learn(
    directory: Path,
    engine: str,
    backends: Sequence[dict[str, Any]],
    requests: Requests,
    *,
    repeats: int = 0,
) -> Learned:
    """Send REQUESTS requests one after the other through Envoy; the EPP picks among `backends`, as
    in router.yaml. Then measure the truth: `repeats` prompts of each of LENGTHS lengths, in turn.
    `engine`: URL of the engine that computes all prompts, the backend ENGINE."""
    lengths = _lengths(REQUESTS)
    Random(1).shuffle(lengths)
    repeated: dict[int, list[float]] = {length: [] for length in _lengths(LENGTHS) if repeats}
    async with routing(directory, backends, requests) as (picker, url), _session() as http:
        number = count()

        async def seconds(length: int) -> float:
            body = requests.body(length, next(number))
            return await _prefill_seconds(http, url, engine, body, length)

        sent = [(length, await seconds(length)) for length in lengths]
        estimate = await _estimate(picker)
        for _ in range(repeats):
            for length, measured in repeated.items():
                measured.append(await seconds(length))
        return Learned(estimate, sent, repeated)


def _lengths(number: int) -> list[int]:
    """`number` lengths from SHORTEST to LONGEST, at equal distances."""
    return [SHORTEST + i * (LONGEST - SHORTEST) // (number - 1) for i in range(number)]


async def _prefill_seconds(
    http: aiohttp.ClientSession, url: str, engine: str, body: dict[str, Any], length: int
) -> float:
    """Send a request; returns the engine's own seconds for its prefill, without a hit."""
    before = after = await _counted(engine)
    async with http.post(url, json=body) as answer:
        assert answer.status == 200, await answer.text()
        await answer.read()

    async def is_counted() -> bool:
        nonlocal after
        after = await _counted(engine)
        return after[0] > before[0]

    await until(is_counted)
    assert after[0] == before[0] + 1
    assert after[2] - before[2] == length, "a hit"
    return after[1] - before[1]


async def _counted(engine: str) -> tuple[float, float, float]:
    """Prefills, their seconds, and their tokens, as the engine counts them."""
    page = await figures(engine + endpoints.METRICS)
    seconds, tokens = metrics.ENGINE_PREFILL_SECONDS, metrics.ENGINE_PREFILL_TOKENS
    names = (f"{seconds}_count", f"{seconds}_sum", f"{tokens}_sum")
    count, total, computed = (figure(page, name) for name in names)
    return count, total, computed


async def _estimate(picker: Epp) -> Estimate:
    url = f"http://127.0.0.1:{picker.metrics}{endpoints.DEBUG_PODS}"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        reports = msgspec.json.decode(await answer.read(), type=list[PodReport])
    return next(report for report in reports if report.name == ENGINE).estimates["prefill"]


@asynccontextmanager
async def routing(
    directory: Path, backends: Sequence[dict[str, Any]], requests: Requests
) -> AsyncIterator[tuple[Epp, str]]:
    """An EPP and Envoy; yields the EPP and the URL for completions."""
    config = directory / "router.yaml"
    serving = {"enabled": any(backend["role"] != "unified" for backend in backends)}
    plugins = [{"type": plugin} for plugin in requests.plugins]
    document = {"disaggregated_serving": serving, "plugins": plugins, "backends": list(backends)}
    config.write_text(json.dumps(document))

    def drop_timing(bootstrap: Json) -> None:
        if requests.has_timing:
            return
        listener = next(
            each for each in bootstrap["static_resources"]["listeners"] if each["name"] == "clients"
        )
        manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
        # Before the response reaches ext_proc.
        for host in manager["route_config"]["virtual_hosts"]:
            host["response_headers_to_remove"] = [headers.TIMING]

    async with epp(config) as picker:
        settings = envoy_settings(picker.grpc)
        async with envoy(directory, settings, change=drop_timing) as url:
            yield picker, f"{url}/v1/completions"


def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120))
