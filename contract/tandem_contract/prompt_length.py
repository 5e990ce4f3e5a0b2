"""Whether the text of a prompt can fit a model. Pure.

    length = engine_length(models)                                  by an engine's /v1/models
    problem = length_problem(kind, members, len(body), length)      the error, or None

No text is tokenized: three bounds say how many tokens it has at least. The first is vLLM's own rule
(`TokenizeParams._text_len_check`): no token has more characters than the longest. But the longest
tokens are runs, such as 128 spaces. So the second counts the varied bytes of a text: ASCII without
white space and control characters, and of these each that differs from the twelfth before it. A run
of up to four characters, or of six, repeats itself after twelve, so it has none after its start.
Every other token is short. The third counts varied letters of Chinese, Japanese, Korean and
Cyrillic in the same way, of which a token has fewer than ASCII. No normalizer of a tokenizer
removes such bytes and letters, or makes one of two: Unicode composes them with marks only, which
are not counted. Other scripts, in many of which letters are marks that normalizers do remove, are
counted by the first rule alone.

The EPP, the router and the sidecar apply the rule before an engine gets the request. Who has the
vocabulary knows its `token_sizes`; others assume `ANY_VOCABULARY`. Images and other media are no
text.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import msgspec
from msgspec import Raw

from .request_kinds import RequestKind


class TokenSizes(NamedTuple):
    """What no token of a vocabulary exceeds."""

    longest: int
    """Characters."""
    varied: int
    """Varied bytes, with the first twelve counted."""
    letters: int = 24
    """Varied letters, with the first twelve counted."""


ANY_VOCABULARY: Final = TokenSizes(longest=256, varied=64)
"""Of any model. The vocabularies of Llama 3, Qwen, DeepSeek, Gemma, Mistral and gpt-oss end at
128 characters, which are runs of spaces or of one sign, and at 39 varied bytes; those of GPT-4o,
Qwen 3, DeepSeek V3, Llama 3.1 and Gemma 3 at 16 varied letters, as does what SentencePiece makes by
default. Too low: prompts that fit are refused. Too high: more prompts that cannot fit reach an
engine, which refuses them itself."""


EXHAUSTING: Final = 1024 * 1024
"""Characters of a text, about 250,000 tokens, that may keep an engine's tokenizer busy until its
health check fails. Smaller bodies are not searched for their text. Too low: long prompts get no
second chance when a pod hangs for another reason. Too high: one request can hang a pod of each
pool."""


LIST_SECONDS: Final = 60.0
"""Seconds between two looks at the list of models of an engine that stays healthy. Too long: a text
is not refused for that long after a list that did not come."""


class PromptText(NamedTuple):
    """Characters of a prompt; of several prompts in one request, of the longest."""

    total: int = 0
    """In all turns of the conversation."""
    certain: int = 0
    """Those that every chat template renders: of the system and of users, without white space at
    the ends. Templates may leave out what models said before, such as their thoughts."""
    varied: int = 0
    """Varied bytes of the certain ones."""
    letters: int = 0
    """Varied letters of the certain ones."""

    def least_tokens(self, sizes: TokenSizes = ANY_VOCABULARY) -> int:
        """Tokens that the certain text has at least."""
        return max(
            -(-self.certain // sizes.longest),
            -(-self.varied // sizes.varied),
            -(-self.letters // sizes.letters),
        )


NO_TEXT: Final = PromptText()


class _Model(msgspec.Struct):
    max_model_len: int | None = None
    parent: str | None = None
    """The model of a LoRA adapter."""


class _Models(msgspec.Struct):
    data: list[_Model]


class _Part(msgspec.Struct):
    text: str = ""


class _Turn(msgspec.Struct):
    role: str = "user"
    content: str | list[_Part | str] | None = None


_TURNS_IN: Final = {
    RequestKind.CHAT: ("messages",),
    RequestKind.RESPONSES: ("instructions", "input"),
    RequestKind.MESSAGES: ("system", "messages"),
}
"""The members that hold a conversation, or a text that stands for one turn."""
_models: Final = (msgspec.json.Decoder(_Models),)
_RENDERED: Final = frozenset({"system", "developer", "user"})
_prompt: Final = (msgspec.json.Decoder(str), msgspec.json.Decoder(list[str]))
_turns: Final = (msgspec.json.Decoder(str), msgspec.json.Decoder(list[_Turn]))
_parts: Final = (msgspec.json.Decoder(str), msgspec.json.Decoder(list[_Part]))
_SHORTENED: Final = frozenset(
    {"chat_template", "prompt_embeds", "truncate_prompt_tokens", "truncation"}
)
"""Members with which an engine may compute less than the text of the request."""


_PERIOD: Final = 12
"""Bytes after which a run of 1, 2, 3, 4 or 6 bytes repeats itself."""
_PIECE: Final = 64 * 1024
"""Characters that are compared at once: few enough for the processor's cache."""
_UNCOUNTED: Final = bytes(range(0x21)) + b"\x7f"
"""White space and control characters."""
_IS_LETTER: Final = bytes(255 * (0x4E <= n <= 0x9F or 0xAC <= n <= 0xD6) for n in range(256))
"""By the high byte of a code point: whether it is an ideograph or a syllable of Korean."""
_BLOCKS: Final = tuple(
    (bytes(255 * (n == block) for n in range(256)), bytes(255 * (n in low) for n in range(256)))
    for block, low in (
        (0x30, {*range(0x41, 0x97), *range(0xA1, 0xFB)}),
        (0x04, {*range(0x83), *range(0x8A, 0x100)}),
    )
)
"""Blocks of kana and Cyrillic, in which marks and punctuation are no letters: by the high byte of
a code point, whether it is in the block, and by the low one, whether it is a letter then."""
_AS_THEY_ARE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_SPELLED: Final = {n: n for n in _AS_THEY_ARE} | {
    256 + at: n for at, n in enumerate(n for n in range(256) if n not in _AS_THEY_ARE)
}
"""Characters by which byte-level vocabularies spell bytes (GPT-2's `bytes_to_unicode`)."""


def prompt_text(kind: RequestKind, members: Mapping[str, Raw]) -> PromptText:
    """The text in a request's body. What cannot be read counts nothing: the engine refuses it."""
    text = _text(kind, members)
    if _SHORTENED.isdisjoint(members):
        return text
    return PromptText(text.total)


def _text(kind: RequestKind, members: Mapping[str, Raw]) -> PromptText:
    match kind:
        case RequestKind.COMPLETIONS:
            return _longest(_decode(_prompt, members.get("prompt")))
        case RequestKind.GENERATE:
            # Its prompt is token ids, which no tokenizer reads.
            return PromptText()
        case _:
            total = certain = varied = letters = 0
            for name in _TURNS_IN[kind]:
                for role, text in _texts(name, members.get(name)):
                    total += len(text)
                    if role in _RENDERED:
                        certain += len(text.strip())
                        varied += _varied(text)
                        letters += _varied_letters(text)
            return PromptText(total, certain, varied, letters)


def plain_text(text: str) -> PromptText:
    """A text that is tokenized as it is."""
    return PromptText(len(text), len(text), _varied(text), _varied_letters(text))


def _varied(text: str) -> int:
    """Varied bytes of a text, without its first twelve."""
    count, before = 0, b""
    for at in range(0, len(text), _PIECE):
        piece = text[at : at + _PIECE].encode("ascii", "ignore").translate(None, _UNCOUNTED)
        piece = before + piece
        before = piece[-_PERIOD:]
        if len(piece) > _PERIOD:
            # All bytes are compared in one step, as two numbers: zeros are equal bytes. The last
            # twelve are compared with nothing and are no zeros.
            number = int.from_bytes(piece, "little")
            differences = (number ^ (number >> 8 * _PERIOD)).to_bytes(len(piece), "little")
            count += len(piece) - _PERIOD - differences.count(0)
    return count


def _varied_letters(text: str) -> int:
    """Varied letters of a text, without its first twelve. A letter counts if the twelfth character
    before it is a letter, too, and differs in its low byte."""
    count, before = 0, b""
    for at in range(0, len(text), _PIECE):
        piece = text[at : at + _PIECE]
        if piece.isascii():
            before = b""
            continue
        units = before + piece.encode("utf-16-le", "surrogatepass")
        before = units[-2 * _PERIOD :]
        low, high = units[::2], units[1::2]
        # All are compared in one step, as in `_varied`.
        letters = _number(high.translate(_IS_LETTER))
        for is_in_block, is_letter in _BLOCKS:
            letters |= _number(high.translate(is_in_block)) & _number(low.translate(is_letter))
        number, shift = _number(low), 8 * _PERIOD
        differences = (number ^ number >> shift) & letters & letters >> shift
        count += len(low) - differences.to_bytes(len(low), "little").count(0)
    return count


def _number(data: bytes) -> int:
    return int.from_bytes(data, "little")


def token_sizes(vocabulary: Iterable[str]) -> TokenSizes:
    """What no token of `vocabulary` exceeds, as `tokenizer.json` spells them."""
    longest = varied = letters = 1
    for token in vocabulary:
        longest = max(longest, len(token))
        # `_most_letters` is one more than the token's length, at most.
        if len(token) >= letters and not token.isascii():
            letters = max(letters, *map(_most_letters, (token, _as_bytes(token))))
        if len(token) > varied:
            ascii_bytes = token.encode("ascii", "ignore").translate(None, _UNCOUNTED)
            varied = max(varied, min(_PERIOD, len(ascii_bytes)) + _varied(token))
    return TokenSizes(longest, varied, letters)


def _most_letters(token: str) -> int:
    """Varied letters of a token, with its first twelve characters, and one that it may cut."""
    return min(_PERIOD, len(token)) + _varied_letters(token) + 1


def _as_bytes(token: str) -> str:
    """What a token of a byte-level vocabulary says; one of another kind is left as it is."""
    spelled = token.translate(_SPELLED)
    if max(spelled) > "\xff":
        return token
    return spelled.encode("latin-1").decode("utf-8", "ignore")


def certain_text(kind: RequestKind, members: Mapping[str, Raw], size: int) -> PromptText:
    """The text in a body of `size` bytes; none if it is too small to hold up an engine."""
    return prompt_text(kind, members) if size > EXHAUSTING else NO_TEXT


def length_problem(
    kind: RequestKind, members: Mapping[str, Raw], size: int, max_model_len: int | None
) -> str | None:
    """The error for a body of `size` bytes whose text cannot fit; None: it may. Only a body that
    may hold such a text is searched for it."""
    if max_model_len is None or size <= max_model_len * ANY_VOCABULARY.varied:
        return None
    return over_length(certain_text(kind, members, size), max_model_len)


def over_length(
    text: PromptText, max_model_len: int | None, sizes: TokenSizes = ANY_VOCABULARY
) -> str | None:
    """The error for a prompt with this text; None: it may fit. `max_model_len` is in tokens; None:
    not known."""
    if max_model_len is None or (tokens := text.least_tokens(sizes)) <= max_model_len:
        return None
    return too_long(max_model_len, f"{text.certain} characters, which are at least {tokens} tokens")


def too_long(max_model_len: int, contents: str) -> str:
    """The error for a prompt of `contents`."""
    return (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt"
        f" contains {contents}. Please reduce the length of the prompt."
    )


def engine_length(models: bytes) -> int | None:
    """Tokens of the longest prompt and answer that an engine takes, by its list of models; None:
    not known, because a model has no `max_model_len`. LoRA adapters have that of their model."""
    listed = _decode(_models, Raw(models))
    if listed is None:
        return None
    return longest_length(model.max_model_len for model in listed.data if model.parent is None)


def longest_length(lengths: Iterable[int | None]) -> int | None:
    """The longest of the lengths; None: one is not known, or there is none."""
    longest = 0
    for length in lengths:
        if length is None:
            return None
        longest = max(longest, length)
    return longest or None


def _decode(decoders: tuple[msgspec.json.Decoder[Any], ...], raw: Raw | None) -> Any:
    """What the first decoder that can read `raw` makes of it; None: none can."""
    if raw is None:
        return None
    for decoder in decoders:
        try:
            return decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return None


def _longest(prompts: str | list[str] | None) -> PromptText:
    texts = [
        plain_text(text) for text in (prompts if isinstance(prompts, list) else [prompts or ""])
    ]
    # Each is a bound of its own: a request is refused for one prompt that is too long.
    return PromptText(*map(max, *texts, NO_TEXT, NO_TEXT))


def _texts(member: str, raw: Raw | None) -> list[tuple[str, str]]:
    """Role and text of each turn, or part of one, of a member."""
    if member in ("instructions", "system"):
        content = _decode(_parts, raw)
        turns = [_Turn("system", content)] if isinstance(content, str | list) else []
    else:
        value = _decode(_turns, raw)
        turns = [_Turn(content=value)] if isinstance(value, str) else value
        turns = turns if isinstance(turns, list) else []
    return [
        (turn.role, part if isinstance(part, str) else part.text)
        for turn in turns
        for part in ([turn.content] if isinstance(turn.content, str) else turn.content or ())
    ]
