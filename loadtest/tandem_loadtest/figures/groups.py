"""What is kept of the records of a group of requests until its `Figures` are made."""

from array import array
from collections import Counter
from collections.abc import Iterable
from statistics import fmean

from ..records import COMPLETE, Outcome, Record
from .distributions import Delay, of_histogram, of_values
from .gaps import Gaps
from .model import Figures, Slo


def tpot(record: Record) -> float | None:
    """Mean seconds per output token after the first; None with a single token or no usage."""
    first, last, tokens = record.first_token, record.last_token, record.output_tokens
    if first is None or last is None or tokens is None or tokens < 2:
        return None
    return (last - first) / (tokens - 1)


def is_within(record: Record, slo: Slo) -> bool:
    """Whether a complete answer meets every limit of `slo`.

    A limit of TTFT or ITL is missed by an answer that shows neither, as it was not streamed. An
    answer of a single token has no ITL, and meets that limit. Without usage, the mean of its gaps
    counts.
    """
    if slo.ttft is not None or slo.itl is not None:
        if record.first_token is None:
            return False
        if slo.ttft is not None and record.first_token - record.intended > slo.ttft:
            return False
        if slo.itl is not None:
            itl = tpot(record)
            if itl is None and record.output_tokens is None and record.gaps:
                itl = fmean(record.gaps)
            if itl is not None and itl > slo.itl:
                return False
    return slo.e2e is None or (
        record.ended is not None and record.ended - record.intended <= slo.e2e
    )


class Group:
    """Requests that share routing path, backends and model. Times in seconds."""

    def __init__(self) -> None:
        self.outcomes: Counter[Outcome] = Counter()
        self.ended = array("d")
        """When each request ended; without those that never began."""
        self.losses: dict[Outcome, array[float]] = {}
        """Outcome of a loss → when each request ended; intended time of an unsent one."""
        self.ttft_intended = array("d")
        """Intended time of each value of `ttft`."""
        self.ttft = array("d")
        self.ttft_wire = array("d")
        self.tpot = array("d")
        self.e2e = array("d")
        self.e2e_wire = array("d")
        self.gaps = Gaps()
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.cached_tokens: int | None = None
        self.within_slo = 0

    def add(self, record: Record, slo: Slo | None) -> None:
        """Count a record, and its times and tokens if its answer is complete."""
        outcome, ended = record.outcome, record.ended
        self.outcomes[outcome] += 1
        if ended is not None:
            self.ended.append(ended)
        if outcome not in COMPLETE:
            # Times of a failed request would make a server that fails fast look good.
            times = self.losses.setdefault(outcome, array("d"))
            times.append(record.intended if ended is None else ended)
            return
        self._add_times(record)
        self.prompt_tokens += record.prompt_tokens or 0
        self.output_tokens += record.output_tokens or 0
        if record.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + record.cached_tokens
        if slo and is_within(record, slo):
            self.within_slo += 1

    def _add_times(self, record: Record) -> None:
        intended, sent = record.intended, record.sent
        first, ended = record.first_token, record.ended
        if first is not None:
            if record.gaps:
                self.gaps.add(first, record.gaps)
            self.ttft_intended.append(intended)
            self.ttft.append(first - intended)
            if sent is not None:
                self.ttft_wire.append(first - sent)
            per_token = tpot(record)
            if per_token is not None:
                self.tpot.append(per_token)
        if ended is not None:
            self.e2e.append(ended - intended)
            if sent is not None:
                self.e2e_wire.append(ended - sent)

    @property
    def requests(self) -> int:
        """All of the group, whatever their outcome."""
        return self.outcomes.total()

    @property
    def complete(self) -> int:
        """Those with a complete answer."""
        return sum(self.outcomes[outcome] for outcome in COMPLETE)

    def figures(self, slo: Slo | None, delay: Delay) -> Figures:
        """Figures of the group; `delay` decides which of them are valid."""
        return Figures(
            requests=self.requests,
            outcomes={str(outcome): count for outcome, count in sorted(self.outcomes.items())},
            ttft=of_values(self.ttft, delay, from_intended=True),
            ttft_wire=of_values(self.ttft_wire, delay),
            itl=of_histogram(self.gaps.histogram(), delay),
            tpot=of_values(self.tpot, delay),
            e2e=of_values(self.e2e, delay, from_intended=True),
            e2e_wire=of_values(self.e2e_wire, delay),
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            cached_tokens=self.cached_tokens,
            within_slo=self.within_slo if slo else None,
        )


def merge(groups: Iterable[Group]) -> Group:
    """A group of all requests of `groups`."""
    merged = Group()
    for group in groups:
        merged.outcomes.update(group.outcomes)
        for outcome, times in group.losses.items():
            merged.losses.setdefault(outcome, array("d")).extend(times)
        for mine, values in (
            (merged.ended, group.ended),
            (merged.ttft_intended, group.ttft_intended),
            (merged.ttft, group.ttft),
            (merged.ttft_wire, group.ttft_wire),
            (merged.tpot, group.tpot),
            (merged.e2e, group.e2e),
            (merged.e2e_wire, group.e2e_wire),
        ):
            mine.extend(values)
        merged.gaps.merge(group.gaps)
        merged.prompt_tokens += group.prompt_tokens
        merged.output_tokens += group.output_tokens
        if group.cached_tokens is not None:
            merged.cached_tokens = (merged.cached_tokens or 0) + group.cached_tokens
        merged.within_slo += group.within_slo
    return merged
