"""The flags of `tandem bench` as `BenchOptions`. Errors are click's usage errors."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import randrange
from typing import Any, Final
from urllib.parse import urlsplit

import click
import msgspec

from tandem_contract.request_kinds import PATHS, SAMPLING_PARAMS, RequestKind
from tandem_loadtest.figures.model import Slo
from tandem_loadtest.run.errors import OptionsError
from tandem_loadtest.run.options import (
    BenchOptions,
    Reference,
    Search,
    TimedCommand,
    check_options,
)
from tandem_loadtest.run.spec import Target
from tandem_loadtest.workload.settings import Arrivals, Prompts, Workload
from tandem_loadtest.workload.traces import load_trace, pace

_DEFAULT_LIMIT: Final = 100
_DEFAULT_RATE: Final = 1.0
_MAX_SEED: Final = 2**31
_TOKEN_ID_KINDS: Final = (RequestKind.COMPLETIONS, RequestKind.GENERATE)
"""APIs that take a prompt as token ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The values of the command line; `flags` says what each means."""

    url: str
    model: str
    rate: float | None
    arrivals: str | None
    burstiness: float | None
    rate_end: float | None
    concurrency: int | None
    limit: int | None
    duration: float | None
    max_in_flight: int
    processes: int
    workload: str | None
    trace: Path | None
    conversations: Path | None
    prompt_tokens: int | None
    output_tokens: int | None
    shared: float | None
    long: float | None
    turns: int | None
    think: float | None
    adapters: tuple[str, ...]
    tokenizer: Path | None
    seed: int | None
    endpoint: str
    stream: bool
    timeout: float
    headers: tuple[str, ...]
    api_key: str | None
    ca_file: Path | None
    extra_body: str
    temperature: float
    ignore_eos: bool
    wait: float
    warm_up: int
    repeats: int
    slo_ttft: float | None
    slo_itl: float | None
    slo_e2e: float | None
    find_rate: float | None
    commands: tuple[tuple[float, str], ...]
    reference: str | None
    reference_model: str | None
    reference_api_key: str | None
    metrics_urls: tuple[str, ...]
    gpus: int | None
    json_file: Path | None
    html_file: Path | None


def bench_options(flags: Flags) -> BenchOptions:
    """What to run. Raises click.UsageError, with the flag's name, for values that do not fit."""
    _check_base(check_url(flags.url, "URL"))
    for problem, applies in _misfits(flags):
        if applies:
            raise click.UsageError(problem)
    options = BenchOptions(
        target=_target(flags),
        arrivals=_arrivals(flags),
        workload=_workload(flags),
        prompts=_prompts(flags),
        seed=randrange(_MAX_SEED) if flags.seed is None else flags.seed,
        limit=_limit(flags),
        duration=flags.duration,
        max_in_flight=flags.max_in_flight,
        repeats=flags.repeats,
        warm_up=flags.warm_up,
        processes=flags.processes,
        wait=flags.wait,
        commands=tuple(TimedCommand(at=at, command=text) for at, text in flags.commands),
        metrics_urls=tuple(check_url(url, "--metrics") for url in flags.metrics_urls),
        reference=_reference(flags),
        slo=_slo(flags),
        search=Search(attainment=flags.find_rate) if flags.find_rate else None,
        gpus=flags.gpus,
    )
    try:
        check_options(options)
    except OptionsError as err:
        raise click.UsageError(str(err)) from err
    return options


def _misfits(flags: Flags) -> Iterator[tuple[str, object]]:
    """Flags that exclude each other or would have no effect, and whether they are given."""
    process = flags.arrivals or flags.burstiness or flags.rate_end
    yield "--rate and --concurrency exclude each other", flags.rate and flags.concurrency
    yield (
        "--arrivals, --burstiness and --rate-end have no effect with --concurrency",
        process and flags.concurrency,
    )
    yield (
        "--arrivals, --burstiness and --rate-end have no effect with --trace, which has its times",
        process and flags.trace,
    )
    yield "--burstiness needs --arrivals gamma", flags.burstiness and flags.arrivals != "gamma"
    yield "--rate-end needs --arrivals ramp", flags.rate_end and flags.arrivals != "ramp"
    yield (
        "--arrivals ramp needs --rate-end and --duration",
        flags.arrivals == "ramp" and not (flags.rate_end and flags.duration),
    )
    yield "--trace and --conversations exclude each other", flags.trace and flags.conversations
    yield (
        "--workload has no effect with a file of --trace or --conversations",
        flags.workload and (flags.trace or flags.conversations),
    )
    yield (
        "--reference needs greedy answers: leave --temperature at 0",
        flags.reference and flags.temperature,
    )
    yield (
        "--reference-model and --reference-api-key need --reference",
        (flags.reference_model or flags.reference_api_key) and not flags.reference,
    )


def check_url(url: str, flag: str) -> str:
    """`url` if it is one. Raises click.BadParameter."""
    try:
        parts = urlsplit(url)
        # `port` raises ValueError for a number out of range; 0 is no port to connect to.
        usable = parts.scheme in ("http", "https") and parts.hostname and (parts.port or 1)
    except ValueError:
        usable = None
    if not usable:
        raise click.BadParameter(f"{url!r}: write http://HOST:PORT", param_hint=flag)
    return url


def _check_base(url: str) -> None:
    """Raises click.BadParameter for the URL of one API instead of the server's."""
    for path in PATHS.values():
        if urlsplit(url).path.rstrip("/").endswith(path):
            base = url.partition(path)[0]
            raise click.BadParameter(
                f"{url!r} is the URL of one API: write {base} and choose it with --endpoint",
                param_hint="URL",
            )


def _target(flags: Flags) -> Target:
    headers = dict(_header(text) for text in flags.headers)
    if flags.api_key:
        headers.setdefault("authorization", f"Bearer {flags.api_key}")
    return Target(
        url=flags.url,
        model=flags.model,
        endpoint=RequestKind(flags.endpoint),
        stream=flags.stream,
        timeout=flags.timeout,
        headers=headers,
        ca_file=str(flags.ca_file) if flags.ca_file else None,
        extra_body=_extra_body(flags),
        ignore_eos=flags.ignore_eos,
    )


def _header(text: str) -> tuple[str, str]:
    name, colon, value = text.partition(":")
    if not colon or not name.strip() or not text.isprintable():
        raise click.BadParameter(f"{text!r}: write NAME:VALUE", param_hint="--header")
    return name.strip().lower(), value.strip()


def _extra_body(flags: Flags) -> dict[str, Any]:
    try:
        members = msgspec.json.decode(flags.extra_body, type=dict[str, Any])
    except msgspec.MsgspecError as err:
        raise click.BadParameter(f"not a JSON object: {err}", param_hint="--extra-body") from err
    if not flags.temperature:
        # The load generator's own value.
        return members
    if flags.endpoint != RequestKind.GENERATE:
        return {"temperature": flags.temperature, **members}
    # This API has its sampling parameters in an object of their own.
    sampling = members.get(SAMPLING_PARAMS, {})
    if not isinstance(sampling, dict):
        raise click.BadParameter(f"{SAMPLING_PARAMS} is no object", param_hint="--extra-body")
    return {**members, SAMPLING_PARAMS: {"temperature": flags.temperature, **sampling}}


def _arrivals(flags: Flags) -> Arrivals:
    if flags.concurrency:
        return Arrivals(process="closed", concurrency=flags.concurrency)
    if flags.trace:
        return Arrivals(process="trace", time_factor=_time_factor(flags))
    return Arrivals(
        process=flags.arrivals or "poisson",
        rate=flags.rate or _DEFAULT_RATE,
        rate_end=flags.rate_end,
        burstiness=flags.burstiness or 1.0,
    )


def _time_factor(flags: Flags) -> float:
    """The factor by which a trace's times are stretched to come at --rate.

    Reads the trace also without --rate: its errors should come before the run.
    """
    assert flags.trace is not None  # noqa: S101 - the caller checks it
    try:
        arrivals = load_trace(flags.trace, limit=flags.limit)
        return pace(arrivals, flags.rate) if flags.rate else 1.0
    except ValueError as err:
        raise click.UsageError(str(err)) from err


def _workload(flags: Flags) -> Workload:
    file = flags.trace or flags.conversations
    preset = flags.workload or "fixed"
    if file:
        preset = "trace" if flags.trace else "sharegpt"
    return Workload(
        preset=preset,
        file=str(file) if file else None,
        prompt_tokens=flags.prompt_tokens,
        output_tokens=flags.output_tokens,
        shared=flags.shared,
        long=flags.long,
        turns=flags.turns,
        think=flags.think,
        models=dict(_adapter(text) for text in flags.adapters),
    )


def _adapter(text: str) -> tuple[str, float]:
    name, _, weight = text.rpartition("=")
    try:
        value = float(weight)
    except ValueError:
        value = 0.0
    # Not `value <= 0`, which NaN passes.
    if not name or not 0 < value < float("inf"):
        raise click.BadParameter(f"{text!r}: write NAME=WEIGHT", param_hint="--adapter")
    return name, value


def _prompts(flags: Flags) -> Prompts:
    if flags.tokenizer:
        return Prompts(style="tokenizer", tokenizer=str(flags.tokenizer))
    if flags.endpoint in _TOKEN_ID_KINDS and not flags.conversations:
        return Prompts(style="token-ids")
    return Prompts(style="words")


def _limit(flags: Flags) -> int | None:
    if flags.limit or flags.duration or flags.trace or flags.conversations:
        return flags.limit
    return _DEFAULT_LIMIT


def _reference(flags: Flags) -> Reference | None:
    if flags.reference is None:
        return None
    key = flags.reference_api_key
    return Reference(
        url=check_url(flags.reference, "--reference"),
        model=flags.reference_model,
        headers={"authorization": f"Bearer {key}"} if key else {},
        ca_file=str(flags.ca_file) if flags.ca_file else None,
    )


def _slo(flags: Flags) -> Slo | None:
    limits = (flags.slo_ttft, flags.slo_itl, flags.slo_e2e)
    if limits == (None, None, None):
        return None
    return Slo(ttft=flags.slo_ttft, itl=flags.slo_itl, e2e=flags.slo_e2e)
