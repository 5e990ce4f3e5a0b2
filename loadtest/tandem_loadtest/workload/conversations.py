"""The demo's workload: conversations over long shared documents, and short prompts.

    for script in workload(Shape(), seed=7):
        answers = []
        for step in range(len(script.steps)):
            call = script.call(step, answers)
            answers.append(await ask(call))

Everything but the answers, which each next turn repeats, follows from the seed. Text consists of
ASCII words from a fixed list, so that it has at most as many tokens as characters.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from ..calls import Call, Message

_WORDS: Final = """
river stone engine paper window garden signal harbor copper bridge market valley lantern ladder
number letter morning evening winter summer station carriage timber village orchard weather compass
anchor kettle basket meadow thunder silver granite ribbon pocket hammer carries opens follows
gathers measures answers crosses repairs counts watches builds turns slowly quietly often again
always nearly below beyond across under before after early late old small bright heavy narrow
distant quiet warm cold open round steady plain common
"""
_VOCABULARY: Final = tuple(_WORDS.split())


@dataclass(frozen=True, slots=True)
class Shape:
    """Size of the workload; lengths in characters."""

    groups: int = 2
    """Shared documents."""
    users: int = 3
    """Conversations over each document."""
    turns: int = 3
    """Questions per conversation; the last is asked twice."""
    document: int = 1200
    """Exact length of each shared document."""
    question: int = 60
    """Exact length of each question."""
    shorts: int = 6
    """Conversations of one short prompt that shares no prefix."""
    short: int = 40
    """Exact length of each short prompt."""
    max_tokens: int = 16
    """Exact tokens of each answer: an answer that ends at once would compare nothing."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request of a script: which question, and how it is asked."""

    question: int
    """Index of the question; a repeated index repeats the same prompt."""
    stream: bool


@dataclass(frozen=True, slots=True)
class Script:
    """One user's conversation; its requests are sent one after the other."""

    name: str
    document: str
    """Text that every prompt begins with; may be empty."""
    questions: tuple[str, ...]
    steps: tuple[Step, ...]
    chat: bool
    max_tokens: int

    def call(self, step: int, answers: Sequence[str]) -> Call:
        """The request of `step`, given the answers to all steps before it.

        Raises ValueError when there are fewer answers than earlier steps.
        """
        if len(answers) < step:
            raise ValueError(f"step {step} continues {step} answers, {len(answers)} are here")
        current = self.steps[step]
        answer_of: dict[int, str] = {}
        for earlier, answer in zip(self.steps[:step], answers, strict=False):
            # A question asked twice continues with its first answer.
            answer_of.setdefault(earlier.question, answer)
        turns = [(self.questions[i], answer_of[i]) for i in range(current.question)]
        question = self.questions[current.question]
        prompt = self._chat(turns, question) if self.chat else self._text(turns, question)
        return Call(prompt, self.max_tokens, stream=current.stream, ignore_eos=True)

    def _chat(self, turns: Sequence[tuple[str, str]], question: str) -> tuple[Message, ...]:
        messages = [Message("system", self.document)] if self.document else []
        for question_before, answer_before in turns:
            messages += [Message("user", question_before), Message("assistant", answer_before)]
        return (*messages, Message("user", question))

    def _text(self, turns: Sequence[tuple[str, str]], question: str) -> str:
        parts = [self.document] if self.document else []
        for question_before, answer_before in turns:
            parts += [f"Question: {question_before}", f"Answer:{answer_before}"]
        return "\n".join([*parts, f"Question: {question}", "Answer:"])


def workload(shape: Shape, *, seed: int = 0) -> list[Script]:
    """Every script: long conversations first, those of a group beside each other, then the shorts.

    Chat and completions alternate between conversations, streaming and not between requests.
    A group uses one endpoint throughout, so that its users share the document's prefix.
    """
    # One generator for all: the order of the draws below is part of the workload.
    generator = random.Random(seed)
    scripts = []
    for group in range(shape.groups):
        document = _text(generator, shape.document)
        for user in range(shape.users):
            questions = tuple(_text(generator, shape.question) for _ in range(shape.turns))
            steps = [Step(turn, stream=(user + turn) % 2 == 0) for turn in range(shape.turns)]
            # The same prompt once streamed and once not: both answers must be equal.
            again = Step(shape.turns - 1, stream=not steps[-1].stream)
            scripts.append(
                Script(
                    name=f"group-{group}-user-{user}",
                    document=document,
                    questions=questions,
                    steps=(*steps, again),
                    chat=group % 2 == 0,
                    max_tokens=shape.max_tokens,
                )
            )
    return scripts + [_short(generator, shape, i) for i in range(shape.shorts)]


def _short(generator: random.Random, shape: Shape, index: int) -> Script:
    return Script(
        name=f"short-{index}",
        document="",
        questions=(_text(generator, shape.short),),
        steps=(Step(0, stream=index // 2 % 2 == 0),),
        chat=index % 2 == 0,
        max_tokens=shape.max_tokens,
    )


def _text(generator: random.Random, length: int) -> str:
    """Sentences of exactly `length` characters."""
    text = ""
    while len(text) < length:
        words = generator.choices(_VOCABULARY, k=generator.randint(5, 11))
        text += " ".join(words).capitalize() + ". "
    # Cut to the exact length; a full stop replaces a space at the end.
    return text[: length - 1].rstrip().ljust(length, ".")[:length]
