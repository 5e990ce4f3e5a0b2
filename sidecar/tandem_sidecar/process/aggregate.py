"""What several workers say, as one: pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

MONOTONIC: Final = ("counter", "histogram", "summary")
"""Kinds of families whose values a worker that ended still counts for."""

Families = dict[str, dict[str, float]]
"""`# HELP` and `# TYPE` lines of a family → its samples: name and labels → value."""


def families(page: str) -> Families:
    """A page in Prometheus' text format, as `prometheus_client` writes it."""
    found: Families = {}
    head: list[str] = []
    for line in page.splitlines():
        if line.startswith("# HELP"):
            head = [line]
        elif line.startswith("#"):
            head.append(line)
        elif line:
            sample, _, value = line.rpartition(" ")
            found.setdefault("\n".join(head), {})[sample] = float(value)
    return found


def summed(pages: Iterable[Families]) -> Families:
    """Sample by sample; an `_info` is 1."""
    total: Families = {}
    for page in pages:
        for head, samples in page.items():
            into = total.setdefault(head, {})
            for sample, value in samples.items():
                if sample not in into:
                    into[sample] = value
                elif sample.partition("{")[0].endswith("_info"):
                    into[sample] = max(into[sample], value)
                else:
                    into[sample] += value
    return total


def lasting(page: Families) -> Families:
    """Of a worker that ended, what still counts: a sum that falls looks like a restart."""
    return {head: samples for head, samples in page.items() if head.endswith(MONOTONIC)}


def text(page: Families) -> bytes:
    """The page again."""
    lines = []
    for head, samples in page.items():
        lines.append(head)
        lines += [f"{sample} {value!r}" for sample, value in samples.items()]
    return ("\n".join(lines) + "\n").encode()


def state(states: Mapping[int, Mapping[str, Any]], *, draining: bool) -> dict[str, Any]:
    """`/state` of workers, by process id: lists joined, `engine_healthy` if all say so.

    What is neither joined stands under `workers`, apart for each.
    """
    said = states.values()
    return {
        "draining": draining,
        "engine_healthy": bool(said) and all(one["engine_healthy"] for one in said),
        "in_flight": [work for one in said for work in one["in_flight"]],
        "workers": [
            {"pid": pid, **{k: v for k, v in one.items() if k not in _JOINED}}
            | {"in_flight": len(one["in_flight"])}
            for pid, one in states.items()
        ],
    }


def traces(answers: Sequence[Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """What all workers know of one request id, the newest last."""
    return sorted((one for answer in answers for one in answer), key=lambda one: one["received"])


_JOINED: Final = frozenset({"draining", "engine_healthy", "in_flight"})
