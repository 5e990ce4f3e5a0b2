"""Parameters of llm-d's plugins for sessions: names and defaults are llm-d's."""

from typing import Annotated, Final, Literal

from msgspec import Meta

from .parameters import Strict

TOKEN_HEADER: Final = "x-session-token"  # noqa: S105 - a name
ID_HEADER: Final = "x-session-id"
AGENT_HEADERS: Final = (
    "x-claude-code-session-id",
    "x-session-affinity",
    "session-id",
    "session_id",
)
"""Headers in which agents name their session, in llm-d's order."""


class TokenHeader(Strict, frozen=True):
    """Where a token travels."""

    header: str = TOKEN_HEADER


class SessionSource(Strict, frozen=True):
    """A place of session ids."""

    header: str = ""
    attribute: str = ""
    producer: str = ""

    def __post_init__(self) -> None:
        if bool(self.header) == bool(self.attribute):
            raise ValueError("give either header or attribute")


class SessionIds(Strict, frozen=True):
    """How clients name sessions, and how long they are remembered."""

    sources: tuple[SessionSource, ...] = ()
    evictionTtlSeconds: Annotated[float, Meta(gt=0)] = 300.0  # noqa: N815 - llm-d's name
    evictionSweepSeconds: Annotated[float, Meta(gt=0)] = 10.0  # noqa: N815


class SessionParameters(Strict, frozen=True):
    """Parameters of session-affinity-scorer and session-affinity-filter."""

    strategy: Annotated[
        Literal["encoded_endpoint_header", "session_id"],
        Meta(
            description="`encoded_endpoint_header`: responses name the pod in a header that the "
            "client sends back; `session_id`: the client names its session"
        ),
    ] = "encoded_endpoint_header"
    encodedEndpointHeaderConfig: Annotated[  # noqa: N815 - llm-d's name
        TokenHeader, Meta(description="`header` (x-session-token)")
    ] = TokenHeader()
    sessionIdConfig: Annotated[  # noqa: N815
        SessionIds,
        Meta(
            description="`sources`: `header` (x-session-id), or `attribute` agent-identity or "
            "SessionIDDataKey with its plugin listed; the first that is not empty counts. "
            "`evictionTtlSeconds` (300): idle sessions are forgotten; `evictionSweepSeconds` is "
            "ignored: the age is checked at each use"
        ),
    ] = SessionIds()
    profileName: Annotated[  # noqa: N815
        str, Meta(description="the prefill profile, for sessions of prefill pods")
    ] = ""


class SessionIdParameters(Strict, frozen=True):
    """Parameters of session-id-producer."""

    headerName: Annotated[str, Meta(description="header with the id")] = ""  # noqa: N815 - llm-d's
    cookieName: Annotated[str, Meta(description="or cookie with the id")] = ""  # noqa: N815

    def __post_init__(self) -> None:
        if bool(self.headerName) == bool(self.cookieName):
            raise ValueError("give either headerName or cookieName")


class AgentParameters(Strict, frozen=True):
    """Parameters of agent-identity."""

    additionalSessionHeaders: Annotated[  # noqa: N815 - llm-d's name
        tuple[str, ...], Meta(description="headers to look in before those of known agents")
    ] = ()
