"""A request to send (`Call`) and its outcome (`Result`)."""

from dataclasses import dataclass

from tandem_contract.paths import RoutingPath
from tandem_contract.request_kinds import PATHS, RequestKind


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; `role` is `system`, `user` or `assistant`."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Call:
    """One greedy request (temperature 0): a chat when `prompt` is messages, else a completion."""

    prompt: str | tuple[int, ...] | tuple[Message, ...]
    """Text, token ids or chat messages."""
    max_tokens: int
    stream: bool = True
    ignore_eos: bool = False
    """Generate exactly `max_tokens` tokens (vLLM's field), as the trace recorded."""

    @property
    def chat(self) -> bool:
        """Whether it goes to `/v1/chat/completions`."""
        return isinstance(self.prompt, tuple) and isinstance(next(iter(self.prompt), 0), Message)

    @property
    def path(self) -> str:
        """The endpoint's path."""
        return PATHS[RequestKind.CHAT if self.chat else RequestKind.COMPLETIONS]

    def body(self, model: str) -> dict[str, object]:
        """The JSON object to post."""
        body: dict[str, object] = {"model": model}
        if self.chat:
            body["messages"] = self.prompt
        else:
            body["prompt"] = self.prompt
        body |= {"max_tokens": self.max_tokens, "temperature": 0, "return_token_ids": True}
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        return body


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens as the server counted them; `cached_tokens` is None when it does not report them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer, streamed or not; the first choice when there are several."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    """None when the server sends no ids."""
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one call; times in seconds since it was sent."""

    call: Call
    status: int | None = None
    """HTTP status; None when no response came."""
    routing_path: RoutingPath | None = None
    """Routing path from the response header; None without the header."""
    prefill_backend: str | None = None
    decode_backend: str | None = None
    answer: Answer = Answer()
    """The answer, or the part that was received before a failure."""
    ttft: float | None = None
    """Time to the first chunk with a token; None unless streamed."""
    itls: tuple[float, ...] = ()
    """Times between successive chunks with tokens."""
    total: float = 0.0
    """Time to the end of the response, or to the failure."""
    error: str | None = None
    """Reason of the failure; None if and only if the answer is complete."""

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.error is None
