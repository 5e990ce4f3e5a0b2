"""The result of a demo run: figures, mismatches and failures, exit status. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from tandem_contract.paths import RoutingPath
from tandem_loadtest.calls import Answer, Result
from tandem_loadtest.figures.distributions import percentile
from tandem_loadtest.figures.model import UNROUTED
from tandem_loadtest.scrape import Counters

REQUIRED_PATHS: Final = (
    RoutingPath.PREFILL_THEN_DECODE,
    RoutingPath.FAST_DECODE,
    RoutingPath.UNIFIED,
)
"""Paths that the built-in workload must have taken."""


@dataclass(frozen=True, slots=True)
class PathFigures:
    """Statistics of the requests of one path; None where nothing was measured.

    Times are seconds, those of complete, streamed answers; ITL percentiles are over all their gaps.
    """

    requests: int
    failed: int
    ttft_p50: float | None
    ttft_p99: float | None
    itl_p50: float | None
    itl_p99: float | None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An answer that differs from the single engine's."""

    path: str
    prefill: str | None
    decode: str | None
    position: int
    """Index of the first token that differs."""
    served: tuple[int, ...]
    expected: tuple[int, ...]

    def __str__(self) -> str:
        via = f"{self.prefill or '-'} → {self.decode or '-'}"
        served, expected = self.served[self.position :][:4], self.expected[self.position :][:4]
        return f"{self.path} ({via}): token {self.position}: {served} instead of {expected}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures by routing path, and everything that makes the run fail."""

    paths: Mapping[str, PathFigures]
    counters: Counters
    """Differences of the engines' and sidecars' counters over the run."""
    mismatches: tuple[Mismatch, ...]
    failures: tuple[str, ...]
    """Requests without a complete answer, each with its reason."""
    missing: tuple[RoutingPath, ...]
    """Required paths that no request took."""

    @property
    def status(self) -> int:
        """Exit status: 0 only if every answer is complete and correct and no path is missing."""
        return int(bool(self.mismatches or self.failures or self.missing))

    def to_json(self) -> dict[str, object]:
        """`{"paths": {path: figures}, "mismatches", "failed", …}`, times in seconds."""
        paths = {path: asdict(figures) for path, figures in self.paths.items()}
        for path, row in paths.items():
            is_split = path == RoutingPath.PREFILL_THEN_DECODE
            row["kv_bytes"] = int(self.counters.kv_bytes) if is_split else 0
            row["kv_transfer_seconds"] = self.counters.transfer_seconds if is_split else 0.0
        return {
            "paths": paths,
            "mismatches": len(self.mismatches),
            "failed": len(self.failures),
            "missing": [str(path) for path in self.missing],
            "transfers": int(self.counters.transfers),
            "transfers_failed": int(self.counters.transfers_failed),
        }


def judge(
    results: Sequence[Result],
    expected: Sequence[Answer | None],
    counters: Counters,
    *,
    required: Sequence[RoutingPath],
) -> Outcome:
    """Compare `results` with the single engine's answers to the same calls, in the same order.

    An expected answer of None is a call that the single engine could not answer; that counts as a
    failure, too.
    """
    mismatches, failures = [], []
    for result, answer in zip(results, expected, strict=True):
        where = f"{result.routing_path or UNROUTED} ({result.decode_backend or 'no backend'})"
        if not result.ok:
            failures.append(f"{where}: {result.error}")
        elif answer is None:
            failures.append(f"{where}: the single engine did not answer this request")
        elif (mismatch := _compare(result, answer)) is not None:
            mismatches.append(mismatch)
    paths = summarize(results)
    missing = tuple(path for path in required if path not in paths)
    return Outcome(paths, counters, tuple(mismatches), tuple(failures), missing)


def summarize(results: Sequence[Result]) -> dict[str, PathFigures]:
    """Statistics by routing path, in alphabetical order; `unrouted` without the header."""
    by_path: dict[str, list[Result]] = {}
    for result in results:
        by_path.setdefault(result.routing_path or UNROUTED, []).append(result)
    return {path: _figures(by_path[path]) for path in sorted(by_path)}


def _figures(results: Sequence[Result]) -> PathFigures:
    # A failed request's times would make a server that fails fast look good.
    complete = [result for result in results if result.ok]
    ttfts = sorted(result.ttft for result in complete if result.ttft is not None)
    itls = sorted(gap for result in complete for gap in result.gaps)
    return PathFigures(
        requests=len(results),
        failed=len(results) - len(complete),
        ttft_p50=percentile(ttfts, 50) if ttfts else None,
        ttft_p99=percentile(ttfts, 99) if ttfts else None,
        itl_p50=percentile(itls, 50) if itls else None,
        itl_p99=percentile(itls, 99) if itls else None,
    )


def _compare(result: Result, answer: Answer) -> Mismatch | None:
    served, expected = result.answer.token_ids or (), answer.token_ids or ()
    # An answer without token ids proves nothing, so it counts as a mismatch.
    if served == expected and served:
        return None
    pairs = zip(served, expected, strict=False)
    # Without a differing token, the shorter answer ends where the other goes on.
    shorter = min(len(served), len(expected))
    position = next((i for i, (a, b) in enumerate(pairs) if a != b), shorter)
    path = result.routing_path or UNROUTED
    return Mismatch(path, result.prefill_backend, result.decode_backend, position, served, expected)


def table(outcome: Outcome) -> Table:
    """One row per routing path; times in milliseconds, of streamed answers."""
    rows = Table(Column("path", no_wrap=True, min_width=19), box=SIMPLE_HEAD, title="Routing paths")
    for heading in (
        "requests", "TTFT ms\np50/p99", "ITL ms\np50/p99", "KV moved\nMiB", "ms per\ntransfer"
    ):  # fmt: skip
        rows.add_column(heading, justify="right", no_wrap=True)
    for path, row in outcome.paths.items():
        transfers = ("", "")
        if path == RoutingPath.PREFILL_THEN_DECODE:
            counters = outcome.counters
            # At least 1: without any transfer the mean is 0, not an error.
            mean = counters.transfer_seconds / max(1.0, counters.transfers)
            transfers = (f"{counters.kv_bytes / 2**20:,.1f}", _ms(mean))
        rows.add_row(
            path,
            str(row.requests),
            f"{_ms(row.ttft_p50)}/{_ms(row.ttft_p99)}",
            f"{_ms(row.itl_p50)}/{_ms(row.itl_p99)}",
            *transfers,
        )
    return rows


def verdict(outcome: Outcome, *, most: int = 5) -> list[str]:
    """The lines below the table: correct answers, then problems, at most `most` of each kind."""
    total = sum(row.requests for row in outcome.paths.values())
    wrong = len(outcome.mismatches) + len(outcome.failures)
    lines = [f"{total - wrong} of {total} answers equal a single engine's, token for token."]
    lines += [f"differs: {mismatch}" for mismatch in outcome.mismatches[:most]]
    lines += [f"failed: {failure}" for failure in outcome.failures[:most]]
    lines += [f"no request took the path {path}" for path in outcome.missing]
    return lines


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    ms = seconds * 1000
    return f"{ms:,.1f}" if ms < 100 else f"{ms:,.0f}"
