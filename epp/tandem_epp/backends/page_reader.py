"""The few figures that the EPP needs of an engine's metrics page. Pure.

    reader = PageReader()             one per engine: it remembers where each figure stands
    page = reader.read(body)
    page.total                        the process as a whole
    page.ranks                        each data-parallel rank, if the page tells several apart

A vLLM page has tens of kilobytes, and a hundred engines send several per second each. The page is
searched for the needed lines, not parsed. From one scrape to the next only values change, so the
reader looks for each line close to where it stood before, and searches the whole page only when
the number of lines changed or a line is not there.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from typing import Final

from tandem_contract import metrics as names
from tandem_contract import vllm_storage

from ..estimates.engine_figures import EngineCounters, Gauges
from .adapters import AdapterSlots
from .engine_page import EnginePage, ScrapeResult

_DRIFT: Final = 512
"""Bytes by which a line may move between two scrapes, relative to the line before it, because
values in between have more or fewer digits. Further away, the whole page is searched."""
_MIN_LINE: Final = 16
"""Bytes: every needed line is longer."""
_COUNT_EVERY: Final = 16
"""Pages after which the lines are counted again."""
_NO_RANK: Final = -1
"""Rank of a sample without the label `engine`."""
_ENGINE: Final = re.compile(rb'[{,]engine="(\d+)"')
_BLOCKS: Final = re.compile(rb'num_gpu_blocks="(\d+)"')
_BLOCK_SIZE: Final = re.compile(rb'block_size="(\d+)"')
_RUNNING_ADAPTERS: Final = re.compile(rb'running_lora_adapters="([^"]*)"')
_WAITING_ADAPTERS: Final = re.compile(rb'waiting_lora_adapters="([^"]*)"')
_MAX_ADAPTERS: Final = re.compile(rb'max_lora="(\d+)"')

_GAUGES: Final = {
    names.ENGINE_RUNNING: "running",
    names.ENGINE_WAITING: "waiting",
    names.ENGINE_KV_USAGE: "kv_usage",
    names.ENGINE_WAITING_BY_REASON: "deferred",
}
_CONNECTOR_TOKENS: Final = "connector_tokens"
"""`loaded_tokens` of vLLM's connector, whose metric has no label `tier`."""
_COUNTERS: Final = {
    f"{names.ENGINE_PREFILL_SECONDS}_sum": "prefill_seconds",
    f"{names.ENGINE_PREFILL_SECONDS}_count": "prefills",
    f"{names.ENGINE_PREFILL_TOKENS}_sum": "prefill_tokens",
    names.ENGINE_PROMPT_TOKENS: "prompt_tokens",
    f"{names.ENGINE_DECODE_SECONDS}_sum": "decode_seconds",
    f"{names.ENGINE_QUEUE_SECONDS}_sum": "queue_seconds",
    f"{names.ENGINE_QUEUE_SECONDS}_count": "queued",
    f"{names.ENGINE_ITL_SECONDS}_sum": "itl_seconds",
    f"{names.ENGINE_ITL_SECONDS}_count": "itls",
    f"{names.ENGINE_XFER_BYTES}_sum": "transfer_bytes",
    f"{names.ENGINE_XFER_SECONDS}_sum": "transfer_seconds",
    f"{names.ENGINE_XFER_SECONDS}_count": "transfers",
    names.ENGINE_STORAGE_LOAD_BYTES: "loaded_bytes",
    f"{vllm_storage.LOADED_BYTES}_total": "loaded_bytes",
    names.ENGINE_TIER_LOADED: "loaded_tokens",
    f"{vllm_storage.LOADED_TOKENS}_total": _CONNECTOR_TOKENS,
    f"{names.ENGINE_STORAGE_LOAD_SECONDS}_sum": "load_seconds",
    f"{names.ENGINE_STORAGE_LOAD_SECONDS}_count": "loads",
    f"{vllm_storage.LOAD_SECONDS}_sum": "load_seconds",
    f"{vllm_storage.LOAD_SECONDS}_count": "loads",
    names.ENGINE_GENERATION_TOKENS: "generated_tokens",
    names.ENGINE_PREEMPTIONS: "preemptions",
}
_SOURCES: Final = {
    "computed_tokens": names.PromptSource.COMPUTED,
    "external_tokens": names.PromptSource.EXTERNAL,
}
"""Figure → source of prompt tokens."""
_LOOKUPS: Final = {names.ENGINE_PREFIX_HITS: "hits", names.ENGINE_EXTERNAL_HITS: "external"}
"""From these follow the tokens by source where the page does not tell them."""
_CONFIG: Final = "config"
_STARTED: Final = "started"
_ADAPTERS: Final = "adapters"
_FIGURES: Final[Sequence[tuple[bytes, str]]] = [
    (name.encode(), figure)
    for name, figure in (
        *_GAUGES.items(),
        *_COUNTERS.items(),
        *((names.ENGINE_PROMPT_BY_SOURCE, figure) for figure in _SOURCES),
        *_LOOKUPS.items(),
        (names.ENGINE_CACHE_CONFIG, _CONFIG),
        (names.PROCESS_START_TIME, _STARTED),
        (names.ENGINE_ADAPTERS, _ADAPTERS),
    )
]
_REQUIRED_LABEL: Final[Mapping[str, bytes]] = {
    figure: f'source="{source}"'.encode() for figure, source in _SOURCES.items()
} | {"deferred": b'reason="deferred"', "loaded_tokens": b'tier="storage"'}
"""Figure → the label that a sample needs to count."""
_COUNTER_FIELDS: Final = frozenset(field.name for field in fields(EngineCounters))


@dataclass(frozen=True, slots=True)
class _Sample:
    """A line of the page."""

    figure: str
    rank: int
    prefix: bytes
    """The line up to its value, with the newline before it."""
    offset: int
    """Position of `prefix` when the page was last searched as a whole."""


class PageReader:
    """Reads the pages of one engine."""

    def __init__(self) -> None:
        self._samples: list[_Sample] = []
        """The needed lines, in the page's order."""
        self._lines = -1
        """Lines of the page in which `_samples` were found."""
        self._length = 0
        """Bytes of the page whose lines were counted last."""
        self._uncounted = 0
        """Pages read since."""
        self._values: list[float] = []
        self._page = EnginePage(ScrapeResult(Gauges(), b""))
        """What `_values` say: an idle engine's pages differ only in what is not needed."""

    def read(self, body: bytes) -> EnginePage:
        """Read a page in Prometheus' text format. What is missing or no number counts as 0 (a
        gauge) or None."""
        # A newline in front, so that every line starts after one, the first too.
        page = b"\n" + body
        values = self._read_values(page) if self._has_same_lines(page) else None
        if values is None:
            self._samples = _search(page)
            values, self._values = self._read_values(page) or [], []
        if values != self._values or not values:
            self._page = _engine_page(list(zip(self._samples, values, strict=True)))
            self._values = values
        return self._page

    def _has_same_lines(self, page: bytes) -> bool:
        """Whether the page has as many lines as the one that was searched as a whole."""
        # Counting takes as long as reading the values. A page that grew by less than one line has
        # no new line, unless values became shorter too: for that, every 16th page is counted.
        self._uncounted += 1
        if abs(len(page) - self._length) < _MIN_LINE and self._uncounted < _COUNT_EVERY:
            return True
        self._length, self._uncounted = len(page), 0
        before, self._lines = self._lines, page.count(b"\n")
        return self._lines == before

    def _read_values(self, page: bytes) -> list[float] | None:
        """The value of each sample; None when one is not near its place or is no number."""
        values = []
        shift = end = 0
        for sample in self._samples:
            prefix = sample.prefix
            start = sample.offset + shift
            if not page.startswith(prefix, start):
                # After the sample before it: two samples never read one line.
                low = max(end, start - _DRIFT)
                start = page.find(prefix, low, low + 2 * _DRIFT + len(prefix))
                if start < 0:
                    return None
                shift = start - sample.offset
            start += len(prefix)
            end = page.find(b"\n", start)
            if end < 0:
                end = len(page)
            try:
                values.append(float(page[start:end]))
            except ValueError:
                # With a timestamp, perhaps.
                if (value := _number(page[start:end])) is None:
                    return None
                values.append(value)
        return values


def read_page(body: bytes) -> ScrapeResult:
    """The figures of one page, summed over the engines of the process."""
    return PageReader().read(body).total


def _number(text: bytes) -> float | None:
    """The value in `value [timestamp]`."""
    try:
        return float(text.split(maxsplit=1)[0])
    except (ValueError, IndexError):
        return None


def _search(page: bytes) -> list[_Sample]:
    """The needed lines of a page, in the page's order; those without a number are left out."""
    samples = [s for name, figure in _FIGURES for s in _search_name(page, name, figure)]
    return sorted(samples, key=lambda sample: sample.offset)


def _search_name(page: bytes, name: bytes, figure: str) -> Iterator[_Sample]:
    needle = b"\n" + name
    required = _REQUIRED_LABEL.get(figure, b"")
    offset = page.find(needle)
    while offset >= 0:
        start = offset + len(needle)
        end = page.find(b"\n", start)
        line = page[offset : end if end >= 0 else len(page)]
        # A longer metric name may begin with this one: labels or a space must follow.
        if page[start : start + 1] in (b"{", b" "):
            # A label's value may hold `}` or a space, so the last brace ends the labels.
            brace = line.rfind(b"}")
            prefix = line[: brace + 1 if brace >= 0 else len(needle)] + b" "
            is_number = line.startswith(prefix) and _number(line[len(prefix) :]) is not None
            if required in prefix and is_number:
                rank = _ENGINE.search(prefix)
                yield _Sample(figure, int(rank[1]) if rank else _NO_RANK, prefix, offset)
        offset = page.find(needle, start)


def _engine_page(samples: list[tuple[_Sample, float]]) -> EnginePage:
    # NaN or an infinity in one gauge must not spoil every average.
    samples = [(sample, value) for sample, value in samples if isfinite(value)]
    numbers = sorted({sample.rank for sample, _ in samples if sample.figure == "running"})
    ranks: tuple[ScrapeResult, ...] = ()
    # Other numbers belong to a process that runs a part of the ranks and answers for that part.
    if len(numbers) > 1 and numbers == list(range(len(numbers))):
        ranks = tuple(
            # vLLM's adapter metric has no rank: each rank overwrites the others' figures.
            _result(
                (s, value)
                for s, value in samples
                if s.rank in (number, _NO_RANK) and s.figure != _ADAPTERS
            )
            for number in numbers
        )
    return EnginePage(_result(samples), ranks, has_load=bool(numbers))


def _result(samples: Iterable[tuple[_Sample, float]]) -> ScrapeResult:
    sums: dict[str, float] = {}
    config, adapters, adapters_at = b"", b"", 0.0
    usages = 0
    for sample, value in samples:
        figure = sample.figure
        if figure == _ADAPTERS:
            if value > adapters_at:
                adapters, adapters_at = sample.prefix, value
        elif figure == _CONFIG:
            config = config or sample.prefix
        else:
            sums[figure] = sums.get(figure, 0.0) + value
            usages += figure == "kv_usage"
    block_size, blocks = _BLOCK_SIZE.search(config), _BLOCKS.search(config)
    started = sums.get(_STARTED)
    return ScrapeResult(
        Gauges(
            running=sums.get("running", 0.0),
            waiting=sums.get("waiting", 0.0),
            kv_usage=sums.get("kv_usage", 0.0) / (usages or 1),
            deferred=sums.get("deferred", 0.0),
        ),
        incarnation=(b"" if started is None else b"%r" % started) + config,
        block_tokens=int(block_size[1]) if block_size else None,
        blocks=int(blocks[1]) if blocks else None,
        counters=_counters(sums),
        adapters=_adapter_slots(adapters),
    )


def _counters(sums: Mapping[str, float]) -> EngineCounters:
    counters = {figure: value for figure, value in sums.items() if figure in _COUNTER_FIELDS}
    if "computed_tokens" not in counters and "prompt_tokens" in sums:
        external = sums.get("external", 0.0)
        cached = sums.get("hits", 0.0) + external
        counters["computed_tokens"] = max(0.0, sums["prompt_tokens"] - cached)
        counters["external_tokens"] = external
    if _CONNECTOR_TOKENS in sums:
        counters["loaded_tokens"] = sums[_CONNECTOR_TOKENS]
    return EngineCounters(**counters)


def _adapter_slots(labels: bytes) -> AdapterSlots | None:
    running, waiting, slots = (
        pattern.search(labels) for pattern in (_RUNNING_ADAPTERS, _WAITING_ADAPTERS, _MAX_ADAPTERS)
    )
    if not (running and waiting and slots):
        return None
    return AdapterSlots(_names(running[1]), _names(waiting[1]), int(slots[1]))


def _names(labels: bytes) -> frozenset[str]:
    return frozenset(filter(None, labels.decode(errors="replace").split(",")))
