"""The outcome of a request by what was observed of it; pure."""

from typing import Final

import msgspec

from tandem_contract.api_grammar import GRAMMARS
from tandem_contract.request_kinds import RequestKind

from ..records import Outcome

_SHED: Final = frozenset({429, 503})
_BROKEN: Final = frozenset({"abort", "error"})
"""Finish reasons with which an engine says that it gave up."""

LAST_EVENTS: Final = {
    kind: " or ".join(map(bytes.decode, grammar.last_events)) for kind, grammar in GRAMMARS.items()
}
"""The event with which each API ends a stream."""


class Promises(msgspec.Struct, frozen=True):
    """What a complete answer to the request has, besides a finish reason."""

    usage: bool = False
    last_event: str | None = None
    """Name of the stream's last event; None: not streamed."""


class Facts(msgspec.Struct, frozen=True):
    """What was observed of a request that was sent, or could not be."""

    status: int | None = None
    """HTTP status; None: no response came."""
    message: str = ""
    """The server's error message when the status is not 200."""
    answer_error: str | None = None
    """Why the answer is an error or none of its API's; None: it is not."""
    timeout: str | None = None
    """What was not done in time; None: nothing timed out."""
    lost: str | None = None
    """Why there was no connection, or no whole HTTP response; None: there was."""
    finish_reason: str | None = None
    has_usage: bool = False
    has_last_event: bool = False


def classify(facts: Facts, promises: Promises) -> tuple[Outcome, str | None]:
    """The outcome and its reason; the first that fits in the order of `Outcome`.

    The reason is one line, and None if and only if the outcome is `ok`.
    """
    status = facts.status
    if status is not None and status != 200:
        outcome = Outcome.SHED if status in _SHED else Outcome.ERROR_STATUS
        return outcome, f"HTTP {status}: {facts.message}"
    reasons = (
        (Outcome.IN_BAND_ERROR, facts.answer_error or _given_up(facts.finish_reason)),
        (Outcome.TIMEOUT, facts.timeout),
        (Outcome.CONNECTION_LOST, facts.lost),
        (Outcome.TRUNCATED, _missing(facts, promises)),
    )
    return next((pair for pair in reasons if pair[1] is not None), (Outcome.OK, None))


def promises_of(kind: RequestKind, *, stream: bool, usage: bool = True) -> Promises:
    """What the answer to a request of this kind must have.

    `usage`: the request asks for the usage of its stream, for an API that sends it only then. An
    answer that is not streamed has it by its API in responses and messages.
    """
    by_api = kind in (RequestKind.RESPONSES, RequestKind.MESSAGES)
    return Promises(
        usage=by_api or (stream and usage), last_event=LAST_EVENTS[kind] if stream else None
    )


def _given_up(finish_reason: str | None) -> str | None:
    if finish_reason not in _BROKEN:
        return None
    return f"the engine gave up: finish_reason {finish_reason!r}"


def _missing(facts: Facts, promises: Promises) -> str | None:
    if facts.finish_reason is None:
        return "the answer ended without a finish reason"
    if promises.usage and not facts.has_usage:
        return "the answer ended without usage"
    if promises.last_event and not facts.has_last_event:
        return f"the answer ended without {promises.last_event}"
    return None
