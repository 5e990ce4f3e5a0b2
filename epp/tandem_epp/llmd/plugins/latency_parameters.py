"""Parameters of llm-d's plugins that choose by predicted latencies, with its names and defaults."""

from typing import Annotated, Literal

from msgspec import Meta

from .parameters import Strict


class PredictedLatencyParameters(Strict, frozen=True):
    """Parameters of predicted-latency-producer."""

    sloBufferFactor: Annotated[  # noqa: N815 - llm-d's name
        float, Meta(gt=0, description="share of the target for the ITL that counts")
    ] = 1.0
    samplingMean: Annotated[float, Meta(description="ignored")] = 1000.0  # noqa: N815
    maxDecodeTokenSamplesForPrediction: Annotated[  # noqa: N815
        int, Meta(description="ignored")
    ] = 0
    contextTTL: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815
    streamingMode: Annotated[  # noqa: N815
        bool, Meta(description="ignored: the first token is always predicted")
    ] = False
    endpointRoleLabel: Annotated[  # noqa: N815
        str, Meta(description="ignored: the EPP knows the roles")
    ] = ""
    predictInProduce: Annotated[bool, Meta(description="ignored")] = True  # noqa: N815
    useEncoderCacheFeatures: Annotated[bool, Meta(description="ignored")] = False  # noqa: N815
    encoderCacheMatchInfoProducerName: Annotated[  # noqa: N815
        str, Meta(description="ignored")
    ] = ""


class TierParameters(Strict, frozen=True):
    """Parameters of slo-headroom-tier-filter."""

    epsilonExploreNeg: Annotated[  # noqa: N815 - llm-d's name
        float,
        Meta(ge=0, le=1, description="share of the requests that go to pods which miss a target"),
    ] = 0.01
    latencyPredictionInfoProducerName: Annotated[  # noqa: N815
        str, Meta(description="ignored")
    ] = ""


class LatencyScorerParameters(Strict, frozen=True):
    """Parameters of latency-scorer."""

    ttftWeight: Annotated[  # noqa: N815 - llm-d's name
        float, Meta(ge=0, description="weight of the headroom of TTFT")
    ] = 0.8
    tpotWeight: Annotated[  # noqa: N815
        float, Meta(ge=0, description="weight of that of the ITL")
    ] = 0.2
    headroomSelectionStrategy: Annotated[  # noqa: N815
        Literal["least", "most"],
        Meta(description="of pods that meet the targets, the closest to them or the farthest"),
    ] = "least"
    compositeKVWeight: Annotated[  # noqa: N815
        float, Meta(description="ignored: there is always a prediction")
    ] = 1.0
    compositeQueueWeight: Annotated[float, Meta(description="ignored")] = 1.0  # noqa: N815
    compositePrefixWeight: Annotated[float, Meta(description="ignored")] = 1.0  # noqa: N815
    latencyPredictionInfoProducerName: Annotated[  # noqa: N815
        str, Meta(description="ignored")
    ] = ""
    prefixMatchInfoProducerName: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815
