"""A distribution over all repeats."""

from collections import Counter
from collections.abc import Sequence

from ..figures.histogram import RELATIVE_ERROR, percentile_of
from ..figures.model import PERCENTILES, Distribution


def pool(distributions: Sequence[Distribution | None]) -> Distribution | None:
    """The values of all repeats together; None when there is none.

    A single distribution stays as it is. Otherwise percentiles come from the added buckets and are
    at most `RELATIVE_ERROR` off.
    """
    present = [values for values in distributions if values is not None and values.count]
    if len(present) < 2:
        return present[0] if present else None
    counts: Counter[int] = Counter()
    for values in present:
        counts.update(dict(values.buckets))
    count = sum(values.count for values in present)
    minimum = min(values.minimum for values in present)
    maximum = max(values.maximum for values in present)
    return Distribution(
        count=count,
        mean=sum(values.mean * values.count for values in present) / count,
        minimum=minimum,
        maximum=maximum,
        percentiles={f"{p:g}": percentile_of(counts, p, minimum, maximum) for p in PERCENTILES},
        buckets=sorted(counts.items()),
        relative_error=RELATIVE_ERROR,
        invalid=next((values.invalid for values in present if values.invalid), None),
    )
