"""What an EPP behind Envoy learns of a real engine, beside the engine's own prefill times.

    learned = await learn(directory, engine, backends, requests)
    learned.check()

The truth is `vllm:request_prefill_time_seconds`, one request at a time, without hits: the median of
ROUNDS prompts of each of LENGTHS lengths. They go straight to the engine, so the EPP does not see
their answers. They alternate with the requests from which it learns: other work that makes the
machine slower for a while makes both slower.
"""

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from math import sqrt
from pathlib import Path
from random import Random
from statistics import median
from time import monotonic
from typing import Any, Final

import aiohttp
import msgspec

from tandem_contract import endpoints, headers, metrics
from tandem_contract.pod_reports import Estimate, PodReport, Source
from tandem_contract.request_kinds import PATHS, RequestKind
from tandem_contract.trace import DecisionTrace
from tandem_operator.routing.envoy.clusters import Json
from tandem_planner.prefill_fit import PrefillCost

from ...sidecar.real.page import figure, figures
from ..real import Epp, envoy, envoy_settings, epp, until

ENGINE: Final = "engine"
"""Name of the backend whose engine computes all prompts."""
REQUESTS: Final = 50
SHORTEST, LONGEST = 200, 3500
"""Tokens of a prompt."""
LIMIT: Final = 0.15
"""Largest median error of the prediction, relative to the engine's own time."""
MOST_NOISE: Final = 0.1
"""Of the noise of the truth, what an error may exceed its limit by. Larger: any estimate passes
beside enough other work. Smaller: more attempts."""
LENGTHS: Final = 8
"""Lengths of prompts at which the truth is measured."""
ROUNDS: Final = 6
"""Times that the truth is measured at each length: once before, between and after equal parts of
the requests."""
ATTEMPTS: Final = 3
"""Each takes 20 s, and 40 s beside other tests."""
_MAD_TO_DEVIATION: Final = 1.4826
"""Standard deviation of a normal distribution over its median absolute deviation."""
_MEDIAN_ERROR: Final = 1.2533
"""Standard error of a median over that of a mean."""


@dataclass(frozen=True)
class Requests:
    """What is sent."""

    model: str
    is_stream: bool = False
    has_timing: bool = True
    """Whether the EPP sees the header `x-tandem-timing` of answers that have it."""
    plugins: Sequence[str] = ()
    """Types of the EPP's plugins; empty: the cost."""
    plan_keys: Path | None = None
    """Directory of the keys that the EPP signs plans with; None: it signs none. A sidecar without
    plan keys takes a request that is not split for one that no router sent, and reports nothing."""

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
    measured: Mapping[int, Sequence[float]]
    """Tokens → seconds of each prompt that was sent to measure the truth."""
    reports: int
    """Of the requests, those whose answer told the EPP the seconds of the leg or of computing."""

    @property
    def truth(self) -> dict[int, float]:
        """Tokens → median seconds."""
        return {length: median(times) for length, times in self.measured.items()}

    @property
    def noise(self) -> float:
        """Relative standard error of the truth at one length, the median of all lengths."""
        return median(_median_error(times) for times in self.measured.values())

    @property
    def limit(self) -> float:
        """What the error may be: the truth itself is only known up to its noise, of which
        MOST_NOISE counts."""
        return LIMIT + min(self.noise, MOST_NOISE)

    @property
    def excess(self) -> float:
        """By how much the error exceeds its limit; 0 or less: the EPP has learned the truth."""
        return self.error(self.truth) - self.limit

    @property
    def cost(self) -> PrefillCost:
        """The EPP's estimate."""
        names = ("seconds_per_request", "seconds_per_token", "seconds_per_pair")
        return PrefillCost(*(self.estimate.figures[name] for name in names))

    def errors(self, truth: Mapping[int, float]) -> dict[int, float]:
        """Tokens → relative error of the estimate."""
        return {n: self.cost.seconds(n) / seconds - 1 for n, seconds in truth.items()}

    def error(self, truth: Mapping[int, float]) -> float:
        """Median relative error of the estimate."""
        return median(map(abs, self.errors(truth).values()))

    def __str__(self) -> str:
        by_length = ", ".join(
            f"{n}: {1e3 * self.truth[n]:.1f} ms {error:+.1%}"
            for n, error in self.errors(self.truth).items()
        )
        return (
            f"{len(self.requests)} prefills, {self.reports} reported in answers, "
            f"{self.estimate.samples} samples: the EPP errs by "
            f"{self.error(self.truth):.1%} (median of {len(self.truth)} lengths); noise of the "
            f"truth {self.noise:.1%}; {by_length}"
        )

    @property
    def ratios(self) -> list[list[float]]:
        """The estimate over the engine's own seconds, of each request from which the EPP learned,
        in LENGTHS groups of similar length: other work that makes the machine slower for a while
        does so for both."""
        ratios = [self.cost.seconds(n) / seconds for n, seconds in sorted(self.requests)]
        size = max(1, len(ratios) // LENGTHS)
        return [ratios[start : start + size] for start in range(0, len(ratios), size)]

    @property
    def own_excess(self) -> float:
        """As `excess`, relative to the engine's own seconds of the requests themselves."""
        groups = self.ratios
        error = median(abs(median(group) - 1) for group in groups)
        return error - LIMIT - min(median(map(_median_error, groups)), MOST_NOISE)

    def check(self) -> None:
        """Fail unless the EPP has learned the engine's own times: those of the prompts that measure
        the truth or, where other work gave these another speed, those of the requests themselves.
        An EPP that learns wrongly is far from both."""
        assert self.estimate.source is Source.LEARNED
        assert self.estimate.age is not None
        if self.excess > 0:
            print(f"relative to the requests themselves: {self.own_excess:+.1%} beyond the limit")
            assert self.own_excess <= 0, str(self)


def _median_error(times: Sequence[float]) -> float:
    """Relative standard error of the median of `times`."""
    middle = median(times)
    deviation = _MAD_TO_DEVIATION * median(abs(seconds - middle) for seconds in times)
    return _MEDIAN_ERROR * deviation / (middle * sqrt(len(times)))


async def learn(
    directory: Path,
    engine: str,
    backends: Sequence[dict[str, Any]],
    requests: Requests,
) -> Learned:
    """Let a new EPP learn of `engine`, up to ATTEMPTS times, until it has learned the truth; else
    the time counts that is nearest to that. Other work disturbs single attempts; an EPP that learns
    wrongly does so in all of them. What noise hides is found with an engine whose durations are
    declared (tests/epp/estimates/test_learning.py)."""
    attempts: list[Learned] = []
    for number in range(ATTEMPTS):
        place = directory / f"attempt-{number}"
        place.mkdir()
        attempts.append(await attempt(place, engine, backends, requests))
        print(f"\n{attempts[-1]}")
        if attempts[-1].excess <= 0:
            return attempts[-1]
    print(f"learned in no attempt of {ATTEMPTS}: the best one counts")
    return min(attempts, key=lambda learned: min(learned.excess, learned.own_excess))


async def attempt(
    directory: Path, engine: str, backends: Sequence[dict[str, Any]], requests: Requests
) -> Learned:
    """Send REQUESTS requests one after the other through Envoy; the EPP picks among `backends`, as
    in router.yaml. Measure the truth before, between and after parts of them. `engine`: URL of the
    engine that computes all prompts, the backend ENGINE."""
    random, number = Random(1), count()
    lengths, truth_lengths = _lengths(REQUESTS), _lengths(LENGTHS)
    random.shuffle(lengths)
    measured: dict[int, list[float]] = {length: [] for length in truth_lengths}
    async with _session() as http:

        async def seconds(url: str, length: int) -> float:
            body = requests.body(length, next(number))
            return await _prefill_seconds(http, url, engine, body, length)

        async def measure(into: dict[int, list[float]]) -> None:
            for length in random.sample(truth_lengths, LENGTHS):
                into[length].append(await seconds(engine + PATHS[RequestKind.COMPLETIONS], length))

        # The first prompts of a length meet caches and allocations that later ones do not.
        await measure({length: [] for length in truth_lengths})
        await measure(measured)
        sent: list[tuple[int, float]] = []
        part = REQUESTS // (ROUNDS - 1)
        async with routing(directory, backends, requests) as (picker, url):
            for start in range(0, REQUESTS, part):
                sent += [(n, await seconds(url, n)) for n in lengths[start : start + part]]
                if len(sent) == REQUESTS:
                    estimate, reports = await _estimate(picker), await _reports(picker)
                await measure(measured)
                await _is_scraped(picker)
        return Learned(estimate, sent, measured, reports)


async def _is_scraped(picker: Epp) -> None:
    """Wait until the EPP has read the metrics of the engine at rest: what others had it count is
    not taken for the EPP's own requests then."""
    rested = monotonic()

    async def is_newer() -> bool:
        asked = monotonic()
        ages = await picker.figures()
        return ages[f'tandem_epp_scrape_age_seconds{{backend="{ENGINE}"}}'] < asked - rested

    await until(is_newer)


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


async def _reports(picker: Epp) -> int:
    url = f"http://127.0.0.1:{picker.metrics}{endpoints.DEBUG_DECISIONS}?limit={REQUESTS}"
    async with aiohttp.ClientSession() as http, http.get(url) as answer:
        traces = msgspec.json.decode(await answer.read(), type=list[DecisionTrace])
    timings = [trace.timing for trace in traces if trace.timing is not None]
    return sum(timing.leg is not None or timing.compute is not None for timing in timings)


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

    keys = ("--plan-key-dir", str(requests.plan_keys)) if requests.plan_keys else ()
    async with epp(config, *keys) as picker:
        settings = envoy_settings(picker.grpc)
        async with envoy(directory, settings, change=drop_timing) as url:
            yield picker, f"{url}/v1/completions"


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=120)
    # A connection each: an engine closes those that were idle for seconds, maybe just when it is
    # used again.
    connector = aiohttp.TCPConnector(force_close=True)
    return aiohttp.ClientSession(timeout=timeout, connector=connector)
