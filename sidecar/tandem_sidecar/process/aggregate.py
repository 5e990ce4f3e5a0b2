"""Aggregates what several workers answer on their admin sockets into one answer. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from tandem_contract import metrics

CUMULATIVE: Final = ("counter", "histogram", "summary")
"""Types of metric families whose values only grow."""

Families = dict[str, dict[str, float]]
"""`# HELP` and `# TYPE` lines of a metric family → its samples: name with labels → value."""

_MERGED_STATE: Final = frozenset({"draining", "engine_healthy", "in_flight"})
"""Keys of `/state` that are merged over all workers."""


def parse_page(page: str) -> Families:
    """A metrics page in the text format, as `prometheus_client` writes it.

    Keeps samples as text: the supervisor adds them up and never looks at a label.
    """
    families: Families = {}
    header: list[str] = []
    for line in page.splitlines():
        # A family is one HELP line, one TYPE line and its samples, in this order.
        if line.startswith("# HELP"):
            header = [line]
        elif line.startswith("#"):
            header.append(line)
        elif line:
            sample, _, value = line.rpartition(" ")
            families.setdefault("\n".join(header), {})[sample] = float(value)
    return families


def sum_pages(pages: Iterable[Families]) -> Families:
    """The sum of each sample over all pages; `_info` samples stay 1, the first start counts."""
    total: Families = {}
    for page in pages:
        for header, samples in page.items():
            sums = total.setdefault(header, {})
            for sample, value in samples.items():
                if sample not in sums:
                    sums[sample] = value
                # An info sample is 1 in every worker: its labels are the information. Counts are
                # those since the supervisor's start, whichever workers were replaced.
                elif sample.partition("{")[0].endswith(("_info", metrics.PROCESS_START_TIME)):
                    sums[sample] = min(sums[sample], value)
                else:
                    sums[sample] += value
    return total


def cumulative_families(page: Families) -> Families:
    """The families of a worker that exited which stay in the sum.

    Without them counters would fall when a worker exits, which Prometheus takes for a restart.
    Gauges describe a running process and are dropped.
    """
    return {header: samples for header, samples in page.items() if header.endswith(CUMULATIVE)}


def format_page(page: Families) -> bytes:
    """The page in the text format; the inverse of `parse_page`."""
    lines = []
    for header, samples in page.items():
        lines.append(header)
        lines += [f"{sample} {value!r}" for sample, value in samples.items()]
    return ("\n".join(lines) + "\n").encode()


def merge_states(states: Mapping[int, Mapping[str, Any]], *, draining: bool) -> dict[str, Any]:
    """One `/state` from the workers' own, which are given by process id.

    `in_flight` lists are concatenated; `engine_healthy` is true if every worker says so and there
    is one. All other keys stay separate for each worker, under `workers`.
    """
    return {
        "draining": draining,
        "engine_healthy": bool(states) and all(s["engine_healthy"] for s in states.values()),
        "in_flight": [work for state in states.values() for work in state["in_flight"]],
        "workers": [
            {"pid": pid, **{k: v for k, v in state.items() if k not in _MERGED_STATE}}
            | {"in_flight": len(state["in_flight"])}
            for pid, state in states.items()
        ],
    }


def merge_traces(answers: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """The traces that all workers have of one request id, newest last."""
    traces = (trace for answer in answers for trace in answer)
    return sorted(traces, key=lambda trace: trace["received"])
