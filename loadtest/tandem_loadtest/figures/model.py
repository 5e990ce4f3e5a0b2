"""The report of `tandem bench`, as JSON has it. Times in seconds, rates per second.

    report = msgspec.json.decode(file.read_bytes(), type=Report)

Everything that the HTML page and `tandem bench compare` show is in here.
"""

from typing import Final, Literal

import msgspec

from ..records import COMPLETE

FORMAT: Final = "tandem-bench/1"
"""Value of `Report.format`; a reader refuses any other."""

PERCENTILES: Final = (1.0, 5.0, 10.0, 25.0, 50.0, 75.0, 90.0, 95.0, 99.0, 99.9)
"""Percentiles of every distribution."""

UNROUTED: Final = "unrouted"
"""Name of the routing path of requests whose answer has no header for it."""

OTHERS: Final = "others"
"""`Failure.outcome` of those for reasons that are not listed."""


class Distribution(msgspec.Struct, frozen=True, kw_only=True):
    """Values of one quantity, in seconds unless its field says otherwise."""

    count: int
    mean: float
    minimum: float
    maximum: float
    percentiles: dict[str, float]
    """By `PERCENTILES`, as text without a trailing `.0`: `50`, `99`, `99.9`."""
    buckets: list[tuple[int, int]]
    """Index and count of the non-empty buckets of `histogram.Histogram`, in rising order."""
    relative_error: float
    """Largest relative error of `percentiles`; 0 where they come from all values. A value of
    `buckets` is always within `histogram.RELATIVE_ERROR`."""
    invalid: str | None = None
    """Why the figure must not be used: the load generator itself was too slow; None: valid."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of a group of requests. Distributions are of complete answers; None: no value.

    An answer is complete if its outcome is `ok`, or `differs`: it differs from that of a reference
    that does not repeat itself. All other requests are losses.
    """

    requests: int
    """All of the group, whatever their outcome."""
    outcomes: dict[str, int]
    """Outcome → requests; the sum is `requests`. Outcomes without a request are left out."""
    ttft: Distribution | None = None
    """First token − intended time. Streamed requests only, like all of the next six."""
    ttft_wire: Distribution | None = None
    """First token − time sent."""
    itl: Distribution | None = None
    """Every gap between two reads with tokens, of all requests together."""
    tpot: Distribution | None = None
    """(Last token − first token) ÷ (tokens by usage − 1), one value per request."""
    e2e: Distribution | None = None
    """End − intended time; streamed or not, like the next."""
    e2e_wire: Distribution | None = None
    """End − time sent."""
    prompt_tokens: int = 0
    """Sum over complete answers by the server's usage, like the next two."""
    output_tokens: int = 0
    cached_tokens: int | None = None
    """None: the server reports them for no request. A request without them counts as 0."""
    within_slo: int | None = None
    """Complete answers within the SLO; None without one."""

    @property
    def lost(self) -> int:
        """Requests without a complete answer."""
        return self.requests - sum(self.outcomes.get(outcome, 0) for outcome in COMPLETE)


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """Rates over the whole run, per second; of complete answers unless a field says otherwise."""

    due: int
    """Requests, not a rate: those that should have been sent. After a stop (Ctrl-C, or a worker
    process that died), without unsent ones whose intended time lies after it: they are in
    `Repeat.all` and in no rate."""
    lost: int
    """How many of them have no complete answer."""
    scheduled: float
    """`due` requests per second."""
    requests: float
    output_tokens: float
    total_tokens: float
    """Prompt and output tokens."""
    goodput: float | None = None
    """Requests within the SLO; None without one, like the next."""
    attainment: float | None = None
    """Share of the requests `due` that were within the SLO, 0 to 1."""
    invalid: str | None = None
    """Why goodput and attainment must not be used: the load generator's own delays exceed 1 ms and
    5 % of a limit of the SLO. None: they are valid, or there is no SLO."""


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """The run in intervals of equal length; lists have one value per interval."""

    interval: float
    """Seconds."""
    scheduled: list[int]
    """Requests by their intended time; without those after the end of a stopped run."""
    in_flight: list[int]
    """Most requests in flight at the same time."""
    ttft_p50: list[float | None]
    """Of requests intended in the interval, like the next."""
    ttft_p99: list[float | None]
    itl_p50: list[float | None]
    """Of gaps that ended in the interval, like the next."""
    itl_p99: list[float | None]
    losses: dict[str, list[int]]
    """Outcome of a loss → requests that ended so in the interval; an unsent one counts at
    its intended time."""
    paths: dict[str, list[int]]
    """Routing path → requests that ended in the interval; `unrouted` without the header."""
    backends: dict[str, list[int]]
    """Decode backend → requests that ended in the interval."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A command of `--at`."""

    at: float
    """Seconds after the start when it was started."""
    command: str
    seconds: float | None
    """How long it ran; None: it was still running at the end of the run and was stopped."""
    exit_status: int | None
    output: str
    """The end of what it printed."""


class Stall(msgspec.Struct, frozen=True, kw_only=True):
    """The longest time in which a client that had sent a request received nothing.

    The waits of requests that were lost count, too; not those of requests that the load generator
    cut off itself.
    """

    seconds: float
    at: float
    """When it began, in seconds after the start."""
    phase: Literal["first token", "next token", "end"]
    """What the client waited for: the first token, from the time sent (the whole answer if it was
    not streamed); a further token; or the end of the answer, after its last token."""
    request: int
    """Index of the request."""


class Generator(msgspec.Struct, frozen=True, kw_only=True):
    """How well the load generator itself kept up."""

    lateness: Distribution | None
    """Time at which it began to send − intended time."""
    read_lag: Distribution | None
    """How long a byte that arrived may have waited for the event loop."""
    cpu_share: list[float]
    """CPU time ÷ wall time of each worker process; near 1, the process is the bottleneck."""
    resent: int = 0
    """Requests that it sent again, because the server had closed their kept-alive connection before
    they came; each counts once, by its last outcome."""
    warnings: list[str] = []


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """Requests that were lost, or whose answer differs, for the same reason."""

    outcome: str
    """An outcome, or `others`."""
    reason: str
    count: int


class ServerMetrics(msgspec.Struct, frozen=True, kw_only=True):
    """What a server's metrics page said of the run."""

    url: str
    before_after: dict[str, float]
    """Counter, with its labels summed → its increase during the run."""
    gauges: dict[str, list[float | None]]
    """Gauge → one value per second of the run; None where the page could not be read."""
    error: str | None = None
    """Why the page could not be read at the start or at the end."""


class Repeat(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the whole schedule."""

    started: str
    """Time of day, ISO 8601 with zone."""
    seconds: float
    """From the start to the end of the last answer."""
    stopped: bool
    """Whether it was stopped early (Ctrl-C)."""
    all: Figures
    rates: Rates
    paths: dict[str, Figures]
    """By routing path; `unrouted` without the header."""
    prefill_backends: dict[str, Figures]
    decode_backends: dict[str, Figures]
    models: dict[str, Figures]
    """By model name, when there are several."""
    failures: list[Failure]
    """Most frequent first, at most 20; a last one with the outcome `others` counts the rest."""
    timeline: Timeline
    generator: Generator
    events: list[Event] = []
    stall: Stall | None = None
    server: list[ServerMetrics] = []


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits that a good request meets; seconds. None: no limit."""

    ttft: float | None = None
    itl: float | None = None
    """Limit of the mean gap between tokens of a request."""
    e2e: float | None = None


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over all repeats, with its 95 % confidence interval."""

    value: float
    """The mean over the repeats."""
    low: float | None = None
    """None with a single repeat, like `high`."""
    high: float | None = None
    unit: str
    invalid: str | None = None
    """The reason of the first repeat in which the figure is invalid."""


class SearchStep(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the search for the highest rate that meets the SLO."""

    rate: float
    """Sessions per second."""
    scheduled: float
    """Requests per second that should have been sent, over the time in which sessions began."""
    achieved: float
    """Requests per second that were answered completely, until the last answer or the end of that
    time, whichever is later."""
    attainment: float
    """Share of all scheduled requests that were within the SLO, 0 to 1."""
    invalid: str | None = None
    """Why the step says nothing of the server: the load generator itself was too late, or had too
    few sessions; None: it is valid."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one `tandem bench`."""

    format: str = FORMAT
    tandem_version: str
    machine: str
    url: str
    model: str
    endpoint: str
    """Kind of API: `chat`, `completions`, …"""
    workload: dict[str, str | int | float | bool | None]
    """Its name and parameters, and those of the arrivals and the seed."""
    processes: int
    gpus: int | None
    """Number to normalise by; None when not given."""
    slo: Slo | None
    summary: dict[str, Estimate]
    """Name, like `ttft_p99` or `output_tokens_per_second` → value over all repeats."""
    repeats: list[Repeat]
    """At least one."""
    search: list[SearchStep] = []
    """Steps of the search that preceded the repeats, in order; empty without one. The repeats are
    at the highest rate that met the SLO."""
