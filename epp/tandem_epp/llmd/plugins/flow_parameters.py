"""Parameters of llm-d's plugins for flow control, with its names and defaults."""

from typing import Annotated, Literal

from msgspec import Meta

from .parameters import Strict


class UtilizationDetectorParameters(Strict, frozen=True):
    """Parameters of utilization-detector."""

    queueDepthThreshold: Annotated[  # noqa: N815 - llm-d's name
        int, Meta(gt=0, description="requests in the queue of a full engine")
    ] = 5
    kvCacheUtilThreshold: Annotated[  # noqa: N815
        float, Meta(gt=0, le=1, description="used share of a full KV cache")
    ] = 0.8
    metricsStalenessThreshold: Annotated[  # noqa: N815
        str,
        Meta(description="a busy backend is full whose figures are that much overdue"),
    ] = "200ms"
    headroom: Annotated[
        float,
        Meta(ge=0, description="as a filter: how far these limits may be exceeded, as a share"),
    ] = 0.0


class ConcurrencyDetectorParameters(Strict, frozen=True):
    """Parameters of concurrency-detector."""

    maxConcurrency: Annotated[  # noqa: N815 - llm-d's name
        int, Meta(gt=0, description="requests in flight of a full backend")
    ] = 100
    maxTokenConcurrency: Annotated[  # noqa: N815
        int, Meta(gt=0, description="prompt tokens in flight of a full backend")
    ] = 1_000_000
    concurrencyMode: Annotated[  # noqa: N815
        Literal["requests", "tokens", "hybrid"],
        Meta(description="what counts; hybrid: the one of which more is used"),
    ] = "requests"
    headroom: Annotated[
        float, Meta(ge=0, description="as a filter: how far the limit may be exceeded, as a share")
    ] = 0.0
    inFlightLoadProducerName: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815


class StaticLimitParameters(Strict, frozen=True):
    """Parameters of static-usage-limit-policy."""

    threshold: Annotated[
        float, Meta(description="saturation from which on requests of every priority wait")
    ] = 1.0


class HoldbackParameters(Strict, frozen=True):
    """Parameters of priority-holdback-policy."""

    minCeiling: Annotated[  # noqa: N815 - llm-d's name
        float, Meta(ge=0, lt=1, description="saturation from which on the lowest priority waits")
    ]
    maxCeiling: Annotated[  # noqa: N815
        float, Meta(gt=0, le=1, description="the same of the highest priority")
    ] = 1.0
    domain: Annotated[
        Literal["rank", "value"],
        Meta(description="whether those between them are spread by rank or by value"),
    ] = "rank"
    shape: Annotated[Literal["linear"], Meta(description="how they are spread")] = "linear"
