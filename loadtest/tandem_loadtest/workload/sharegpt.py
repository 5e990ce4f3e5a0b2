"""Recorded conversations: ShareGPT-like JSON or JSON Lines, whose user texts are sent as they are.

    [{"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}]}, …]
    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}

The recorded answers only say how long the model's answers are; later turns repeat what the model
really answers. Errors: `ConversationsError`, one line: `file:line: what is wrong` for JSON Lines,
`file: entry N: what is wrong` for an array, with N from 1. They contain no text of the file.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from .sessions import Turn
from .settings import WorkloadError

_SYSTEM: Final = ("system",)
_USER: Final = ("human", "user")
_ASSISTANT: Final = ("gpt", "assistant", "chatgpt", "bing", "bard", "model")

CountTokens = Callable[[str], int]
"""Tokens of a text, at least 1."""


class ConversationsError(WorkloadError):
    """The file cannot be sent; the message has the file, the line or entry, and the cause."""


@dataclass(frozen=True, slots=True)
class Conversation:
    """A recorded conversation."""

    system: str
    """The system prompt; may be empty."""
    exchanges: tuple[tuple[str, str], ...]
    """What the user said, and the recorded answer; at least one."""


class _ShareGptMessage(msgspec.Struct):
    """A message of either kind; other fields are skipped."""

    role: str = msgspec.field(name="from", default="")
    value: str = ""


class _OpenAiMessage(msgspec.Struct):
    role: str
    content: str


class _Entry(msgspec.Struct):
    """A conversation of either format; other fields are skipped."""

    conversations: tuple[_ShareGptMessage, ...] | None = None
    messages: tuple[_OpenAiMessage, ...] | None = None


def estimate_tokens(text: str) -> int:
    """A token per four characters, at least 1: a common rule for English text."""
    return max(1, round(len(text) / 4))


def load_conversations(file: Path, *, limit: int | None = None) -> list[Conversation]:
    """The first `limit` conversations of `file` (all without it) that have an answer of the model.

    Messages of the user that follow each other are joined with an empty line between them; what
    comes before the user's first message and after the last answer is left out.

    Raises ConversationsError when the file cannot be read, is not UTF-8 or of neither format, or
    has no such conversation.
    """
    conversations = (_conversation(where, entry) for where, entry in _entries(file))
    usable = list(islice((c for c in conversations if c is not None), limit))
    if not usable:
        raise ConversationsError(f"{file}: has no conversation with an answer")
    return usable


def _entries(file: Path) -> Iterator[tuple[str, _Entry]]:
    try:
        data = file.read_bytes()
    except OSError as err:
        raise ConversationsError(f"{file}: cannot read it: {err.strerror}") from err
    decoder = msgspec.json.Decoder(_Entry)
    for where, raw in _raw_entries(file, data.removeprefix(b"\xef\xbb\xbf")):
        try:
            yield where, decoder.decode(raw)
        except msgspec.ValidationError as err:
            raise ConversationsError(f"{where}: {err}") from err
        except (msgspec.DecodeError, UnicodeDecodeError) as err:
            raise ConversationsError(f"{where}: not JSON in UTF-8: {err}") from err


def _raw_entries(file: Path, data: bytes) -> Iterable[tuple[str, bytes | msgspec.Raw]]:
    """JSON of the entries, each with its place for messages."""
    if not data.lstrip().startswith(b"["):
        lines = enumerate(data.split(b"\n"), 1)
        return ((f"{file}:{number}", line) for number, line in lines if line.strip())
    try:
        # Entries stay encoded: with a limit, most of a large file is never decoded.
        entries = msgspec.json.decode(data, type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError) as err:
        raise ConversationsError(f"{file}: not a JSON array: {err}") from err
    return ((f"{file}: entry {number}", raw) for number, raw in enumerate(entries, 1))


def _conversation(where: str, entry: _Entry) -> Conversation | None:
    """The conversation of an entry; None if it has no answer to a user."""
    if entry.conversations is not None:
        said = [(s.role, s.value) for s in entry.conversations]
    elif entry.messages is not None:
        said = [(m.role, m.content) for m in entry.messages]
    else:
        raise ConversationsError(f"{where}: expected a field `conversations` or `messages`")
    system: list[str] = []
    asked: list[str] = []
    exchanges: list[tuple[str, str]] = []
    for role, text in said:
        if role in _SYSTEM:
            system.append(text)
        elif role in _USER:
            asked.append(text)
        elif role not in _ASSISTANT:
            known = ", ".join((*_SYSTEM, *_USER, *_ASSISTANT))
            raise ConversationsError(f"{where}: unknown role {role[:20]!r}: expected {known}")
        elif any(part.strip() for part in asked):
            exchanges.append(("\n\n".join(asked), text))
            asked = []
    return Conversation("\n\n".join(system), tuple(exchanges)) if exchanges else None


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of what is sent of a conversation; None: no bound."""

    prompt_tokens: int | None = None
    """Longest prompt: the conversation ends before a turn whose prompt, with all that it repeats,
    is longer."""
    output_tokens: int | None = None
    """Longest answer: longer ones are cut to it."""
    turns: int | None = None
    """Most turns of a conversation."""


def to_turns(conversation: Conversation, limits: Limits, count: CountTokens) -> tuple[Turn, ...]:
    """The turns of a conversation; none if the first prompt is too long already."""
    turns: list[Turn] = []
    most = limits.prompt_tokens
    prompt = count(conversation.system) if most and conversation.system else 0
    for user, answer in conversation.exchanges[: limits.turns]:
        output = count(answer)
        if limits.output_tokens is not None:
            output = min(output, limits.output_tokens)
        if most is not None:
            prompt += count(user)
            if prompt > most:
                break
            prompt += output
        turns.append(Turn(user, output))
    return tuple(turns)
