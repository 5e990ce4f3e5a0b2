"""Scorers and filters that use other plugins of the configuration."""

from typing import Final

from .names import unknown_name
from .parameters import PrefixScorerParameters
from .plugin_types import Listed
from .profile import Scorer
from .scorers import PrefixCacheScorer
from .session_parameters import (
    AGENT_HEADERS,
    ID_HEADER,
    AgentParameters,
    SessionIdParameters,
    SessionParameters,
    SessionSource,
)
from .sessions import IdSession, IdSource, Session, TokenSession

_PRODUCERS: Final = ("approx-prefix-cache-producer", "precise-prefix-cache-producer")


def prefix_scorer(parameters: PrefixScorerParameters, listed: Listed) -> Scorer:
    """The scorer of the producer that `parameters` name: bursts, or what is cached. Raises
    ValueError if it is not listed."""
    producer = parameters.prefixMatchInfoProducerName
    if (burst := listed.burst(producer)) is not None:
        return burst
    # Both indexes may answer without being listed under these names.
    if producer and producer not in (*listed.names, *_PRODUCERS):
        raise ValueError(unknown_name("prefixMatchInfoProducerName", producer, listed.names))
    return PrefixCacheScorer(
        parameters.matchLengthWeight, parameters.matchLengthScaleTokens, listed.prefix_tokens
    )


def session_of(parameters: SessionParameters, listed: Listed) -> Session:
    """The kind of sessions that `parameters` stand for. Raises ValueError for an attribute that no
    listed plugin provides."""
    is_prefill = parameters.profileName == listed.prefill_profile
    if parameters.strategy == "encoded_endpoint_header":
        header = parameters.encodedEndpointHeaderConfig.header.strip().lower()
        return TokenSession(header, is_prefill)
    ids = parameters.sessionIdConfig
    sources = [place for source in ids.sources for place in _places(source, listed)]
    return IdSession(
        sources or [IdSource(ID_HEADER)], ids.evictionTtlSeconds, is_prefill=is_prefill
    )


def _places(source: SessionSource, listed: Listed) -> list[IdSource]:
    """Where to look for the ids of `source`, in order."""
    if source.header:
        return [IdSource(source.header.strip().lower())]
    if source.attribute == "agent-identity":
        agents = listed.parameters(AgentParameters)
        if agents is None:
            raise ValueError("attribute agent-identity needs the plugin agent-identity")
        names = (*agents.additionalSessionHeaders, *AGENT_HEADERS)
        return [IdSource(name.strip().lower()) for name in names]
    if source.attribute == "SessionIDDataKey":
        ids = listed.parameters(SessionIdParameters)
        if ids is None:
            raise ValueError("attribute SessionIDDataKey needs the plugin session-id-producer")
        return [IdSource(ids.headerName.strip().lower(), ids.cookieName.strip())]
    raise ValueError(
        f"attribute {source.attribute!r}: use agent-identity, SessionIDDataKey, or a header"
    )
