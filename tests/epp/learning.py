"""What an EPP behind Envoy learns of a real engine, beside the engine's own prefill times.

    learned = await learn(directory, engine, backends, requests)
    learned.check()

The truth is `vllm:request_prefill_time_seconds` of each request, one at a time, without hits.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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
_NOISE: Final = 1.3
"""Error that is allowed, as a multiple of that of a fit of the engine's own times: where other work
slows the machine down for seconds, that one already exceeds LIMIT."""


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
    """The truth of each request, and what the EPP predicts after all of them."""

    estimate: Estimate
    truth: list[tuple[int, float]] = field(default_factory=list)
    """Tokens and seconds."""

    @property
    def cost(self) -> PrefillCost:
        names = ("seconds_per_request", "seconds_per_token", "seconds_per_pair")
        return PrefillCost(*(self.estimate.figures[name] for name in names))

    def error(self, cost: PrefillCost) -> float:
        """Median relative error of `cost`."""
        return median(abs(cost.seconds(n) / seconds - 1) for n, seconds in self.truth)

    def check(self) -> None:
        """Fail unless the EPP's estimate is right within LIMIT, or as right as noise allows."""
        fit = PrefillFit()
        for i, (length, seconds) in enumerate(self.truth):
            fit.add(prefill_sample([(length, 0)], seconds), float(i))
        best, own = self.error(fit.cost), self.error(self.cost)
        apart = median(abs(self.cost.seconds(n) / fit.cost.seconds(n) - 1) for n, _ in self.truth)
        print(
            f"\n{len(self.truth)} prefills, {self.estimate.samples} samples: the EPP errs by "
            f"{own:.1%} (median), a fit of the engine's own times by {best:.1%}; they are "
            f"{apart:.1%} apart"
        )
        assert self.estimate.source is Source.LEARNED
        assert self.estimate.age is not None
        assert own <= max(LIMIT, _NOISE * best)
        assert apart <= LIMIT


async def learn(
    directory: Path, engine: str, backends: Sequence[dict[str, Any]], requests: Requests
) -> Learned:
    """Send requests one after the other through Envoy; the EPP picks among `backends`, as in
    router.yaml. `engine`: URL of the engine that computes all prompts, the backend ENGINE."""
    lengths = [SHORTEST + i * (LONGEST - SHORTEST) // (REQUESTS - 1) for i in range(REQUESTS)]
    Random(1).shuffle(lengths)
    truth = []
    async with routing(directory, backends, requests) as (picker, url), _session() as http:
        for i, length in enumerate(lengths):
            before = await _counted(engine)
            async with http.post(url, json=requests.body(length, i)) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()
            after = before

            async def is_counted() -> bool:
                nonlocal after
                after = await _counted(engine)
                return after[0] > before[0]  # noqa: B023 - called in this iteration only

            await until(is_counted)
            assert after[0] == before[0] + 1
            assert after[2] - before[2] == length, "a hit"
            truth.append((length, after[1] - before[1]))
        return Learned(await _estimate(picker), truth)


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
