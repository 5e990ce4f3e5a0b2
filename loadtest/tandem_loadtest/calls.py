"""A request to send (`Call`) and what was measured of it (`Result`)."""

from dataclasses import dataclass

import msgspec

from tandem_contract.paths import RoutingPath
from tandem_contract.request_kinds import PATHS, RequestKind

from .records import Outcome


class Message(msgspec.Struct, frozen=True):
    """One chat message; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


Prompt = str | tuple[int, ...] | tuple[Message, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """One greedy request (temperature 0)."""

    prompt: Prompt
    """Chat messages, or the user's text, for chat, responses and messages; text or token ids for
    completions; token ids for generate."""
    max_tokens: int
    stream: bool = True
    ignore_eos: bool = False
    """Generate exactly `max_tokens` tokens (vLLM's field); the messages API has no such field."""
    kind: RequestKind | None = None
    """The API; None: chat when the prompt is messages, else completions."""
    model: str | None = None
    """Model name to send; None: the client's."""

    @property
    def endpoint(self) -> RequestKind:
        """The API that the call goes to."""
        if self.kind is not None:
            return self.kind
        prompt = self.prompt
        is_chat = isinstance(prompt, tuple) and isinstance(next(iter(prompt), 0), Message)
        return RequestKind.CHAT if is_chat else RequestKind.COMPLETIONS

    @property
    def path(self) -> str:
        """The endpoint's path."""
        return PATHS[self.endpoint]


class Usage(msgspec.Struct, frozen=True):
    """Tokens as the server counted them; `cached_tokens` is None when it does not report them.

    `prompt_tokens` includes cached ones for every API.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


class Answer(msgspec.Struct, frozen=True):
    """A server's answer, streamed or not; the first choice when there are several."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    """None when the server sends no ids."""
    finish_reason: str | None = None
    usage: Usage | None = None
    reasoning: str = ""
    tool_calls: str = ""
    """Names and arguments of the calls, joined."""


class Result(msgspec.Struct, frozen=True):
    """What was measured of one call.

    Times are `time.monotonic()` seconds, a clock that all processes of the machine share; None for
    what did not happen.
    """

    call: Call
    status: int | None = None
    """HTTP status; None when no response came."""
    routing_path: RoutingPath | None = None
    """Routing path from the response header; None without the header."""
    prefill_backend: str | None = None
    decode_backend: str | None = None
    answer: Answer = Answer()
    """The answer, or the part that was received before a failure."""
    error: str | None = None
    """Reason of the failure in one line, without text of the answer; None if and only if the
    outcome is `ok`."""
    outcome: Outcome = Outcome.OK
    started: float | None = None
    """When the client began to send it."""
    sent: float | None = None
    """When its first byte was written to a connected socket; of a request that was sent again, to
    the first one."""
    first_token: float | None = None
    """When the first read with generated tokens came; None unless streamed."""
    last_token: float | None = None
    """When the last read with generated tokens came; None unless streamed."""
    ended: float | None = None
    """When the answer was complete, or failed."""
    gaps: tuple[float, ...] = ()
    """Seconds between successive reads with tokens."""
    resent: int = 0
    """How often it was sent again, because the server had closed the kept-alive connection before
    the request came; 0 or 1."""

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.error is None

    @property
    def ttft(self) -> float | None:
        """Seconds from the time it was sent to its first token; None unless streamed."""
        if self.first_token is None or self.sent is None:
            return None
        return self.first_token - self.sent

    @property
    def total(self) -> float | None:
        """Seconds from the time it was sent to its end or failure; None if never sent."""
        return None if self.ended is None or self.sent is None else self.ended - self.sent
