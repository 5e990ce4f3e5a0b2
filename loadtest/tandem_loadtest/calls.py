"""What is asked and what came of it."""

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
    """Generate `max_tokens` whatever comes (vLLM's field): a trace's output lengths are kept."""

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
    """Tokens as the server counted them; `cached_tokens` is None where it does not say."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server said, streamed or not; of several choices the first."""

    text: str = ""
    token_ids: tuple[int, ...] | None = None
    """None where the server sends no ids."""
    finish_reason: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One call and what came of it; times in seconds from the moment it was sent."""

    call: Call
    status: int | None = None
    """HTTP status; None when no response came."""
    routing_path: RoutingPath | None = None
    """As the server named it; None where it did not."""
    prefill_backend: str | None = None
    decode_backend: str | None = None
    answer: Answer = Answer()
    """Whatever came, also of an answer that broke off."""
    ttft: float | None = None
    """To the first chunk with a token; None unless streamed."""
    itls: tuple[float, ...] = ()
    """Between successive chunks with tokens."""
    total: float = 0.0
    """To the response's end, or to the failure."""
    error: str | None = None
    """Why it failed; None for a whole answer, and for no other."""

    @property
    def ok(self) -> bool:
        """Whether the answer is whole."""
        return self.error is None
