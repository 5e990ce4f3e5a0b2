"""Turns of sessions become calls: `PromptWriter(prompts, kind=…).call(session, turn, answers)`.

    writer = PromptWriter(Prompts(style="words"), kind=RequestKind.CHAT, seed=7)
    call = writer.call(session, 0, ())
    call = writer.call(session, 1, [first_answer])

Text contains nothing but words, without white space at either end: chat templates that strip it
change nothing.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

from tandem_contract.request_kinds import RequestKind

from ..calls import Answer, Call, Message
from .sessions import Segment, Session
from .settings import STYLES, Prompts, WorkloadError
from .text import WORDS, IdSource, TextSource, digest
from .tokenizer import ExactTokenizer


class PromptWriter:
    """Writes the prompts of a run; the same settings and seed give the same prompts everywhere."""

    def __init__(
        self,
        prompts: Prompts,
        *,
        kind: RequestKind,
        seed: int = 0,
        stream: bool = True,
        ignore_eos: bool = True,
    ) -> None:
        """Raises WorkloadError when the style does not fit the kind, or for a broken tokenizer."""
        check_style(prompts, kind)
        self._kind = kind
        self._seed = seed
        self._stream = stream
        self._ignore_eos = ignore_eos
        self._per_message = prompts.tokens_per_message
        self._ids = IdSource() if prompts.style == "token-ids" else None
        self._text: _Style = _Words(prompts.tokens_per_word)
        if prompts.style == "tokenizer":
            self._text = _Exact(ExactTokenizer(Path(prompts.tokenizer or "")))

    def call(self, session: Session, turn: int, answers: Sequence[Answer]) -> Call:
        """The request of a turn, which repeats all before it with their `answers`.

        An answer without text (or token ids, where these are sent) is replaced by generated text
        of the turn's `output_tokens`.
        Raises ValueError when there are fewer answers than earlier turns, or when a turn is text
        and the style is `token-ids`.
        """
        if len(answers) < turn:
            raise ValueError(f"turn {turn} continues {turn} answers, {len(answers)} are here")
        prompt: str | tuple[int, ...] | tuple[Message, ...]
        if self._ids is not None:
            prompt = self._id_prompt(self._ids, session, turn, answers)
        elif self._kind is RequestKind.COMPLETIONS:
            prompt = self._text_prompt(session, turn, answers)
        else:
            prompt = tuple(self._messages(session, turn, answers))
        current = session.turns[turn]
        return Call(
            prompt,
            current.output_tokens,
            stream=self._stream,
            ignore_eos=self._ignore_eos,
            kind=self._kind,
            model=current.model,
        )

    def count(self, text: str) -> int:
        """Tokens of `text`: exact with a tokenizer, else estimated from its words."""
        return self._text.count(text)

    def size(self, call: Call) -> tuple[int, int]:
        """Units (words, or tokens with a tokenizer) and messages of a prompt, for calibration."""
        match call.prompt:
            case str(text):
                return self._text.units(text) + self._text.added, 1
            case (Message(), *_) as messages:
                texts = [m.content for m in messages if isinstance(m, Message)]
                return sum(map(self._text.units, texts)), len(texts)
        return len(call.prompt), 0

    def _id_prompt(
        self, source: IdSource, session: Session, turn: int, answers: Sequence[Answer]
    ) -> tuple[int, ...]:
        prompt: list[int] = []

        def add(content: tuple[Segment, ...] | str) -> None:
            for segment in _generated(content):
                prompt.extend(source.ids(digest(self._seed, segment.key), segment.tokens))

        add(session.system)
        for i in range(turn + 1):
            add(session.turns[i].prompt)
            if i < turn:
                known = answers[i].token_ids
                if known:
                    prompt.extend(known)
                else:
                    add(_filler(session, i))
        return tuple(prompt)

    def _text_prompt(self, session: Session, turn: int, answers: Sequence[Answer]) -> str:
        less = round(self._per_message) + self._text.added
        system, first = session.system, session.turns[0].prompt
        if isinstance(first, str) or isinstance(system, str):
            parts = ["\n".join(filter(None, (self._content(system), self._content(first))))]
        else:
            parts = [self._write((*system, *first), less)]
        for i in range(turn):
            parts.append(self._answer(session, i, answers[i], first=False))
            following = session.turns[i + 1].prompt
            if isinstance(following, str):
                parts.append("\n" + following)
            else:
                parts.append(self._write(following, first=False))
        return "".join(parts)

    def _messages(
        self, session: Session, turn: int, answers: Sequence[Answer]
    ) -> Iterator[Message]:
        if session.system:
            yield Message("system", self._content(session.system))
        # The first turn pays for the template's tokens of the system message, each later one for
        # those of the answer before it: shared parts have the same length in every prompt.
        messages = 2 if session.system else 1
        for i in range(turn + 1):
            less = round(messages * self._per_message)
            yield Message("user", self._content(session.turns[i].prompt, less))
            if i < turn:
                yield Message("assistant", self._answer(session, i, answers[i], first=True))
            messages = 2

    def _answer(self, session: Session, turn: int, answer: Answer, *, first: bool) -> str:
        return answer.text or self._write(_filler(session, turn), first=first)

    def _content(self, content: Sequence[Segment] | str, less: int = 0) -> str:
        """Text of a message: from a file as it is, or generated; empty only without segments."""
        if isinstance(content, str):
            return content
        return self._write(content, less) if content else ""

    def _write(self, segments: Sequence[Segment], less: int = 0, *, first: bool = True) -> str:
        """Text of `segments`, shorter at its end by `less` tokens but not empty."""
        left = max(1, sum(segment.tokens for segment in segments) - less)
        lengths: list[tuple[bytes, int]] = []
        for segment in segments:
            if left <= 0:
                break
            lengths.append((digest(self._seed, segment.key), min(segment.tokens, left)))
            left -= segment.tokens
        return self._text.write(lengths, first=first)


def check_style(prompts: Prompts, kind: RequestKind) -> None:
    """Raises WorkloadError when no prompt of this style can be sent to `kind`."""
    if prompts.style not in STYLES:
        raise WorkloadError(f"prompt style {prompts.style!r}: write one of {', '.join(STYLES)}")
    takes_ids = kind in (RequestKind.COMPLETIONS, RequestKind.GENERATE)
    if prompts.style == "token-ids" and not takes_ids:
        raise WorkloadError(
            f"endpoint {kind.value} takes text: use the prompt style `tokenizer` or `words`"
        )
    if prompts.style != "token-ids" and kind is RequestKind.GENERATE:
        raise WorkloadError("endpoint generate takes token ids: use the prompt style `token-ids`")
    if prompts.style == "tokenizer" and not prompts.tokenizer:
        raise WorkloadError("prompt style `tokenizer` needs the path of a tokenizer.json")


class _Style(Protocol):
    """Text of given numbers of tokens."""

    added: int
    """Tokens that the server's tokenizer puts around a completion's prompt."""

    def write(self, parts: Sequence[tuple[bytes, int]], *, first: bool) -> str:
        """Text of parts (digest, tokens); it starts a message, or continues one after a space."""

    def count(self, text: str) -> int:
        """Tokens of `text`."""

    def units(self, text: str) -> int:
        """What calibration relates tokens to."""


class _Words:
    """Words, of a mean number of tokens each."""

    added = 0

    def __init__(self, tokens_per_word: float) -> None:
        self._tokens_per_word = tokens_per_word
        self._source = TextSource(WORDS)

    def write(self, parts: Sequence[tuple[bytes, int]], *, first: bool) -> str:
        texts: list[str] = []
        tokens = words = 0
        for identity, length in parts:
            tokens += length
            # Rounded from the start of the message, so that short parts do not add up errors, and
            # what precedes a part, not what follows it, determines its words.
            target = max(1, round(tokens / self._tokens_per_word))
            if target > words:
                is_first = first and not texts
                texts.append(self._source.text(identity, target - words, first=is_first))
                words = target
        return "".join(texts)

    def count(self, text: str) -> int:
        return max(1, round(self.units(text) * self._tokens_per_word))

    def units(self, text: str) -> int:
        return len(text.split())


class _Exact:
    """Text of exact numbers of tokens."""

    def __init__(self, tokenizer: ExactTokenizer) -> None:
        self._tokenizer = tokenizer
        self.added = tokenizer.special_tokens

    def write(self, parts: Sequence[tuple[bytes, int]], *, first: bool) -> str:
        source = self._tokenizer.source
        return "".join(
            source.text(identity, tokens, first=first and not i)
            for i, (identity, tokens) in enumerate(parts)
        )

    def count(self, text: str) -> int:
        return max(1, self._tokenizer.count(text))

    def units(self, text: str) -> int:
        return self._tokenizer.count(text)


def _generated(content: tuple[Segment, ...] | str) -> tuple[Segment, ...]:
    if isinstance(content, str):
        raise ValueError("text of a file cannot be sent as token ids: use another prompt style")
    return content


def _filler(session: Session, turn: int) -> tuple[Segment, ...]:
    """Stands for an answer that is not known."""
    tokens = session.turns[turn].output_tokens
    return (Segment(f"answer/{session.index}/{turn}", tokens),)
