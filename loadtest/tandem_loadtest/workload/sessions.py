"""Conversations to send: who says how much, and which parts of the prompts are shared."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a prompt. Segments of equal key and length are equal text in every prompt."""

    key: str
    """Seeds the text; a longer segment of the same key begins with the shorter one."""
    tokens: int
    """Length, at least 1."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a session: what the user adds, and how much the model answers."""

    prompt: tuple[Segment, ...] | str
    """The user's message: segments to generate, or text from a file."""
    output_tokens: int
    """Tokens of the answer, at least 1."""
    think: float = 0.0
    """Seconds between the end of the previous answer and the intended time of this request. Of a
    first turn, which has it in closed loop only: the last answer of the session before it."""
    model: str | None = None
    """Model name to send; None: the run's. For mixes of LoRA adapters."""


@dataclass(frozen=True, slots=True)
class Session:
    """A conversation; its turns are sent one after the other, each with all that came before."""

    index: int
    """Position in the schedule, from 0."""
    turns: tuple[Turn, ...]
    """At least one."""
    system: tuple[Segment, ...] | str = ()
    """The system prompt: segments to generate, or text from a file; may be empty."""
    start: float | None = None
    """Intended time of the first turn in seconds after the start; None in closed loop."""
