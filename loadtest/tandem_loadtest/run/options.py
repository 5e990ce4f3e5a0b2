"""A whole benchmark as plain values: what `bench.run_bench` is asked for, and its progress."""

import msgspec

from ..figures.model import Slo
from ..workload.schedule import FILES
from .errors import OptionsError
from .spec import Load


class TimedCommand(msgspec.Struct, frozen=True, kw_only=True):
    """A shell command to run during each repeat (`--at`)."""

    at: float
    """Seconds after the start, at least 0."""
    command: str


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The server whose answers are right. Its requests never count in the figures."""

    url: str
    """With or without `/v1`."""
    model: str | None = None
    """Name that the reference serves the model by; None: the name that was sent to the target."""
    headers: dict[str, str] = {}
    """Sent to the reference only. Not the target's: an API key is sent to its own server alone."""
    ca_file: str | None = None


class Search(msgspec.Struct, frozen=True, kw_only=True):
    """The search for the highest rate whose share of requests within the SLO is high enough.

    It begins with the rate of the arrivals. Each step is a run of its own, in which sessions start
    for `BenchOptions.duration` seconds: a number of sessions would be sent so fast at a high rate
    that no queue builds up.
    """

    attainment: float = 0.95
    """Share of scheduled requests that must be within the SLO, above 0 to 1."""
    precision: float = 0.05
    """The search ends when the lowest rate that failed is at most this share above the answer."""
    most_steps: int = 12
    """Runs at most: doubling from 1 to 64 times the first rate, then bisection to 5 %."""


class BenchOptions(Load, frozen=True, kw_only=True):
    """What to send, how often, and what to watch meanwhile.

    `check_options` raises `OptionsError` for values that do not fit together.
    """

    repeats: int = 1
    """Runs of the whole schedule, one after the other. Each has its own seed: `seed`, `seed` + 1,
    …, so that prompts of an earlier repeat are not in the server's prefix cache."""
    warm_up: int = 10
    """Sessions before the first repeat that count nowhere; half of them run one at a time. They
    open no connection that is used later, but calibrate prompts of style `words`."""
    processes: int = 1
    """Worker processes. One sends a few thousand requests per second."""
    wait: float = 0.0
    """Seconds for which the readiness check repeats a check that fails; 0: check only once."""
    stop_grace: float = 0.0
    """Seconds for which requests in flight may still end after a stop (Ctrl-C)."""
    commands: tuple[TimedCommand, ...] = ()
    """Run in every repeat, in its own process group, and stopped at its end. Not during a search
    or the warm-up."""
    metrics_urls: tuple[str, ...] = ()
    """Prometheus pages to read before, every second of, and after every repeat."""
    reference: Reference | None = None
    slo: Slo | None = None
    search: Search | None = None
    """Needs an SLO, a duration and no limit, and arrivals with one rate (`poisson`, `constant` or
    `gamma`). The repeats are then sent at the highest rate that meets it."""
    gpus: int | None = None
    """GPUs of the target, to normalise by."""


class BenchProgress(msgspec.Struct, frozen=True, kw_only=True):
    """How far the benchmark is; for a live display."""

    phase: str
    """`checking`, `warm-up`, `search`, `repeat` or `reference`."""
    step: int = 0
    """Number of the search's step or of the repeat, from 1."""
    steps: int | None = None
    """How many there will be; None: not known (a search)."""
    rate: float | None = None
    """Of a search's step: sessions per second."""
    elapsed: float = 0.0
    """Seconds after the start of the step."""
    scheduled: int = 0
    """Requests whose time has come."""
    sent: int = 0
    in_flight: int = 0
    finished: int = 0
    """Ended with any outcome, those that were never sent included."""
    outcomes: dict[str, int] = {}
    """Outcome → requests."""


_ONE_RATE = frozenset({"poisson", "constant", "gamma"})


def check_options(options: BenchOptions) -> None:
    """Raises OptionsError when the options do not fit together."""
    for problem, applies in (*_problems(options), *_search_problems(options)):
        if applies:
            raise OptionsError(problem)


def _problems(options: BenchOptions) -> tuple[tuple[str, bool], ...]:
    """What may be wrong, and whether it is."""
    return (
        ("the number of repeats must be at least 1", options.repeats < 1),
        ("the number of processes must be at least 1", options.processes < 1),
        ("the number of warm-up sessions must not be negative", options.warm_up < 0),
        ("--max-in-flight must be at least 1", options.max_in_flight < 1),
        ("the number of GPUs must be at least 1", options.gpus is not None and options.gpus < 1),
        ("the limit must be at least 1 session", options.limit is not None and options.limit < 1),
        ("the duration must be above 0 s", options.duration is not None and options.duration <= 0),
        (
            "give a limit or a duration: the schedule would never end",
            options.limit is None
            and options.duration is None
            and options.workload.preset not in FILES,
        ),
        (
            "closed loop needs a concurrency of at least 1",
            options.arrivals.process == "closed" and (options.arrivals.concurrency or 0) < 1,
        ),
        (
            "a reference needs greedy answers: leave the temperature at 0",
            options.reference is not None and options.target.extra_body.get("temperature", 0) != 0,
        ),
    )


def _search_problems(options: BenchOptions) -> tuple[tuple[str, bool], ...]:
    if options.search is None:
        return ()
    has_rate = options.arrivals.process in _ONE_RATE and (options.arrivals.rate or 0) > 0
    return (
        ("the search for a rate needs an SLO", options.slo is None),
        (
            "the search for a rate needs poisson, constant or gamma arrivals with a first rate",
            not has_rate,
        ),
        (
            "--find-rate needs --duration: each step runs that long",
            options.duration is None,
        ),
        (
            "--find-rate and --limit exclude each other: each step runs for --duration",
            options.limit is not None,
        ),
    )
