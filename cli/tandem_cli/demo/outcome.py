"""What a run came to: the figures, what went wrong, and the exit status. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Column, Table

from tandem_contract.paths import RoutingPath
from tandem_loadtest.calls import Answer, Result
from tandem_loadtest.report import UNROUTED, PathFigures, summarize, to_json
from tandem_loadtest.scrape import Counters

WANTED: Final = (
    RoutingPath.PREFILL_THEN_DECODE,
    RoutingPath.FAST_DECODE,
    RoutingPath.UNIFIED,
)
"""Paths that the built-in workload must have taken."""


@dataclass(frozen=True, slots=True)
class Mismatch:
    """An answer that differs from the lone engine's."""

    path: str
    prefill: str | None
    decode: str | None
    position: int
    """First differing token."""
    served: tuple[int, ...]
    expected: tuple[int, ...]

    def __str__(self) -> str:
        via = f"{self.prefill or '-'} → {self.decode or '-'}"
        mine, theirs = self.served[self.position :][:4], self.expected[self.position :][:4]
        return f"{self.path} ({via}): token {self.position}: {mine} instead of {theirs}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Figures by path and everything that speaks against the run."""

    paths: Mapping[str, PathFigures]
    moved: Counters
    """What the engines counted during the run."""
    mismatches: tuple[Mismatch, ...]
    failures: tuple[str, ...]
    """Requests without a whole answer, each with its reason."""
    missing: tuple[RoutingPath, ...]
    """Paths that had to occur and did not."""

    @property
    def status(self) -> int:
        """Exit status: 0 only when every answer is whole and right and no path is missing."""
        return int(bool(self.mismatches or self.failures or self.missing))

    def to_json(self) -> dict[str, object]:
        """`{"paths": {path: figures}, "mismatches", "failed", …}`, times in seconds."""
        paths: dict[str, dict[str, float | int | None]] = to_json(dict(self.paths))
        for path, row in paths.items():
            split = path == RoutingPath.PREFILL_THEN_DECODE
            row["kv_bytes"] = int(self.moved.kv_bytes) if split else 0
            row["kv_transfer_seconds"] = self.moved.transfer_seconds if split else 0.0
        return {
            "paths": paths,
            "mismatches": len(self.mismatches),
            "failed": len(self.failures),
            "missing": [str(path) for path in self.missing],
            "transfers": int(self.moved.transfers),
            "transfers_failed": int(self.moved.transfers_failed),
        }


def judge(
    results: Sequence[Result],
    expected: Sequence[Answer | None],
    moved: Counters,
    *,
    wanted: Sequence[RoutingPath],
) -> Outcome:
    """Compare `results` with the lone engine's answers to the same calls, in the same order.

    An expected None is a call the lone engine could not answer; that counts as a failure too.
    """
    mismatches, failures = [], []
    for result, right in zip(results, expected, strict=True):
        where = f"{result.routing_path or UNROUTED} ({result.decode_backend or 'no backend'})"
        if not result.ok:
            failures.append(f"{where}: {result.error}")
        elif right is None:
            failures.append(f"{where}: the lone engine did not answer this request")
        elif (mismatch := _compare(result, right)) is not None:
            mismatches.append(mismatch)
    paths = summarize(results)
    missing = tuple(path for path in wanted if path not in paths)
    return Outcome(paths, moved, tuple(mismatches), tuple(failures), missing)


def _compare(result: Result, right: Answer) -> Mismatch | None:
    served, expected = result.answer.token_ids or (), right.token_ids or ()
    if served == expected and served:
        return None
    pairs = zip(served, expected, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(served), len(expected)))
    path = result.routing_path or UNROUTED
    return Mismatch(path, result.prefill_backend, result.decode_backend, same, served, expected)


def table(outcome: Outcome) -> Table:
    """One row per routing path; times in milliseconds, of streamed answers."""
    made = Table(Column("path", no_wrap=True, min_width=19), box=SIMPLE_HEAD, title="Routing paths")
    for heading in (
        "requests", "TTFT ms\np50/p99", "ITL ms\np50/p99", "KV moved", "ms per\nmove"
    ):  # fmt: skip
        made.add_column(heading, justify="right", no_wrap=True)
    for path, row in outcome.paths.items():
        moved = ("", "")
        if path == RoutingPath.PREFILL_THEN_DECODE:
            each = outcome.moved.transfer_seconds / max(1.0, outcome.moved.transfers)
            moved = (f"{outcome.moved.kv_bytes / 2**20:,.1f} MiB", _ms(each))
        made.add_row(
            path,
            str(row.requests),
            f"{_ms(row.ttft_p50)}/{_ms(row.ttft_p99)}",
            f"{_ms(row.itl_p50)}/{_ms(row.itl_p99)}",
            *moved,
        )
    return made


def verdict(outcome: Outcome, *, most: int = 5) -> list[str]:
    """The lines below the table: what is right, then what is not, at most `most` of a kind."""
    total = sum(row.requests for row in outcome.paths.values())
    wrong = len(outcome.mismatches) + len(outcome.failures)
    lines = [f"{total - wrong} of {total} answers equal one engine alone, token for token."]
    lines += [f"differs: {mismatch}" for mismatch in outcome.mismatches[:most]]
    lines += [f"failed: {failure}" for failure in outcome.failures[:most]]
    lines += [f"no request took the path {path}" for path in outcome.missing]
    return lines


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    ms = seconds * 1000
    return f"{ms:,.1f}" if ms < 100 else f"{ms:,.0f}"
