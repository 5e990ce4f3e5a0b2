"""Parameters of the plugins of the precise prefix index, under llm-d's names where it has them."""

from typing import Annotated, Any

from msgspec import Meta, Struct

from tandem_contract import ports
from tandem_contract.durations import format_duration, parse_duration

from ...prefix.kv_events.settings import EventSettings
from ...prefix.pod_blocks import MAX_BYTES
from ...prefix.tokenization.tokenizer import TokenizerSettings

Port = Annotated[int, Meta(ge=1, le=65535)]
Duration = Annotated[str, Meta(pattern=r"^\d+(\.\d+)?(ms|s|m|h)$")]


class _Section(Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a plugin's parameters."""


class PodDiscovery(_Section, frozen=True):
    """The ports of engines."""

    socketPort: Port = ports.KV_EVENTS  # noqa: N815 - llm-d's name
    replayPort: Port = ports.KV_EVENTS_REPLAY  # noqa: N815


class KvEvents(_Section, frozen=True):
    """How events are received."""

    topicFilter: str = ""  # noqa: N815 - llm-d's name
    podDiscoveryConfig: PodDiscovery = PodDiscovery()  # noqa: N815
    discoverPods: bool = True  # noqa: N815
    engineType: str = "vllm"  # noqa: N815
    concurrency: int = 0
    zmqEndpoint: str = ""  # noqa: N815


class PreciseIndexParameters(_Section, frozen=True):
    """Parameters of precise-prefix-cache-producer."""

    kvEventsConfig: Annotated[  # noqa: N815 - llm-d's name
        KvEvents,
        Meta(
            description="`topicFilter`; `podDiscoveryConfig.socketPort` (5557) and `.replayPort` "
            "(5657), to which the data-parallel rank is added; the rest of llm-d's is ignored: the "
            "EPP connects to every pod"
        ),
    ] = KvEvents()
    maxBytes: Annotated[  # noqa: N815 - in the style of the others
        int, Meta(ge=1 << 20, description="bytes of the index, over all pods")
    ] = MAX_BYTES
    indexerConfig: Annotated[  # noqa: N815
        dict[str, Any], Meta(description="ignored")
    ] = {}
    tokenProcessorConfig: Annotated[  # noqa: N815
        dict[str, Any],
        Meta(description="ignored: block sizes come from the events, hashes are not recomputed"),
    ] = {}
    speculativeIndexing: Annotated[  # noqa: N815
        bool, Meta(description="ignored: placed prompts always count for affinity")
    ] = False
    speculativeTTL: Annotated[str, Meta(description="ignored")] = ""  # noqa: N815


class VllmRender(_Section, frozen=True):
    """vLLM's render endpoint."""

    url: str = "http://localhost:8000"
    timeout: Duration = format_duration(TokenizerSettings().deadline)
    mmTimeout: Duration = format_duration(TokenizerSettings().media_deadline)  # noqa: N815


class TokenizerParameters(_Section, frozen=True):
    """Parameters of token-producer."""

    modelName: Annotated[  # noqa: N815 - llm-d's name
        str,
        Meta(
            description="the model as the render endpoint knows it; requests for another model use "
            "a LoRA adapter of that name. Several plugins tokenize for several models"
        ),
    ] = ""
    loraAdapters: Annotated[  # noqa: N815 - in the style of the others
        tuple[str, ...],
        Meta(description="the model's adapters; needed beside plugins for other models"),
    ] = ()
    vllm: Annotated[
        VllmRender | None,
        Meta(
            description="`url` of an endpoint of vLLM that renders prompts (`vllm serve`, or "
            "`vllm launch render` without a GPU); `timeout` (200ms) and, for media, `mmTimeout` "
            "(2s), after which a request is placed without its tokens"
        ),
    ] = None
    estimate: Annotated[
        dict[str, Any] | None,
        Meta(description="no tokenizer: prompts are estimated, as without token-producer"),
    ] = None
    udsTokenizerConfig: Annotated[  # noqa: N815
        dict[str, Any] | None,
        Meta(description="refused: use `vllm`, as llm-d advises, or `path`"),
    ] = None
    path: Annotated[
        str,
        Meta(
            description="instead of `vllm.url`: a directory with tokenizer.json and chat template"
        ),
    ] = ""
    cacheBytes: Annotated[  # noqa: N815
        int, Meta(ge=0, description="bytes of cached token ids")
    ] = TokenizerSettings().cache_bytes

    def __post_init__(self) -> None:
        if self.udsTokenizerConfig is not None:
            raise ValueError("udsTokenizerConfig: no such tokenizer; use vllm.url, or path")
        if self.estimate is not None and (self.vllm or self.path):
            raise ValueError("estimate goes without vllm and path")


def event_settings(parameters: PreciseIndexParameters) -> EventSettings:
    """The settings that the parameters stand for."""
    events = parameters.kvEventsConfig
    ports_of_pods = events.podDiscoveryConfig
    return EventSettings(
        ports_of_pods.socketPort, ports_of_pods.replayPort, events.topicFilter, parameters.maxBytes
    )


def tokenizer_settings(parameters: TokenizerParameters) -> TokenizerSettings:
    """The settings that the parameters stand for."""
    vllm = parameters.vllm or VllmRender(url="")
    return TokenizerSettings(
        directory=parameters.path,
        url=vllm.url,
        model=parameters.modelName,
        adapters=parameters.loraAdapters,
        deadline=parse_duration(vllm.timeout),
        media_deadline=parse_duration(vllm.mmTimeout),
        cache_bytes=parameters.cacheBytes,
    )
