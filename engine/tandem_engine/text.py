"""Tokenizer, incremental detokenizer, stop strings.

    Tokenizer(directory)          text ↔ token ids, from `tokenizer.json`
    Detokenizer(tokenizer)        token ids → text, never half a character
    StopStrings(("\\n\\n",))        text → text up to the first stop string

Errors: `TokenizerUnusable`: the model directory's tokenizer cannot be read.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer as _HfTokenizer

from tandem_contract.prompt_length import token_sizes

from .types import EngineError

TOKENIZER_FILE: Final = "tokenizer.json"

_REPLACEMENT: Final = "\N{REPLACEMENT CHARACTER}"
_MAX_PENDING: Final = 3
"""A UTF-8 character has at most four bytes, so at most three can be incomplete."""
_MAX_HELD: Final = 32
"""Replacement characters at the end of a text from which on it is returned without a last
character: so many bytes that are no text would otherwise be decoded again with each token."""
_WINDOW: Final = 12
"""Most tokens that one push decodes; its cost grows with them."""
_CONTEXT: Final = 4
"""Tokens kept when the window is cut, since decoders look at what precedes a word."""
_PENDING_CONTEXT: Final = 10
"""Tokens kept while characters are incomplete: more than these can span."""


class TokenizerUnusable(EngineError):
    """The tokenizer file is missing or malformed; the message names it."""


class Tokenizer:
    """A Hugging Face `tokenizer.json`."""

    def __init__(self, directory: Path) -> None:
        """Raises TokenizerUnusable."""
        file = directory / TOKENIZER_FILE
        try:
            self._hf = _HfTokenizer.from_str(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as err:
            raise TokenizerUnusable(f"{file}: cannot read it: {err}") from err
        # tokenizers raises nothing narrower than Exception for a malformed file.
        except Exception as err:
            raise TokenizerUnusable(f"{file}: not a tokenizer: {err}") from err
        # A tokenizer.json may ask for both, which would change prompts silently.
        self._hf.no_truncation()
        self._hf.no_padding()
        self.special_ids: Final = frozenset(
            token_id
            for token_id, token in self._hf.get_added_tokens_decoder().items()
            if token.special
        )
        self.sizes: Final = token_sizes(self._hf.get_vocab(with_added_tokens=True))

    @property
    def vocab_size(self) -> int:
        """Number of token ids the tokenizer knows; the model's embedding may hold more."""
        return int(self._hf.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of `text`, with `add_special_tokens` also those put around a prompt.

        Other threads run meanwhile: unlike `encode`, the batch releases the interpreter's lock.
        """
        (encoding,) = self._hf.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return tuple(encoding.ids)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return str(self._hf.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, special tokens by name."""
        return self.decode((token_id,), skip_special_tokens=False)


class Detokenizer:
    """Token ids in, text out where a character ends.

    A character's bytes may be spread over several tokens, and until the last has come they
    decode to U+FFFD; text with such a tail is held back until it is resolved, or until `flush`. So
    another engine can continue the text after a push that returned some, as with vLLM.
    `prompt_ids` are context only: a first word keeps the space that separates it from them.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        prompt_ids: Sequence[int] = (),
        skip_special_tokens: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        # Skipped ids are left out here: decoders would put their text between the others.
        self._window = [i for i in prompt_ids[-_CONTEXT:] if i not in self._skipped]
        self._text = self._decode(self._window)
        self._given = len(self._text)
        """Leading characters of `_text` that were returned already or belong to the prompt."""

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that is final after `token_ids`."""
        self._window += [i for i in token_ids if i not in self._skipped]
        self._text = self._decode(self._window)
        pending = len(self._text) - len(self._text.rstrip(_REPLACEMENT))
        if 0 < pending <= _MAX_HELD:
            return ""
        final = len(self._text) - min(pending, _MAX_PENDING)
        new = self._text[self._given : final]
        # Never backwards: text that was returned cannot be taken back.
        self._given = max(self._given, final)
        if len(self._window) > _WINDOW:
            self._cut()
        return new

    def flush(self) -> str:
        """The text that was held back; to be called after the last token."""
        tail = self._text[self._given :]
        self._given = len(self._text)
        return tail

    def _cut(self) -> None:
        """Keep only the last tokens, so that a push's cost does not grow with the answer."""
        pending_length = len(self._text) - self._given
        self._window = self._window[-(_PENDING_CONTEXT if pending_length else _CONTEXT) :]
        # The shorter window may decode to another text, but not to another end.
        self._text = self._decode(self._window)
        self._given = len(self._text) - pending_length

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


@dataclass(frozen=True, slots=True)
class StopOutput:
    """The result of `StopStrings.push`: the text to send, and the stop string that ended it."""

    text: str
    stop: str | None = None


class StopStrings:
    """Lets text through up to the first stop string, also one spread over several pushes.

    As many last characters are held back as the longest one has, less 1, as vLLM does. `keep` holds
    nothing back, and leaves the stop string itself in the text (`include_stop_str_in_output`).
    """

    def __init__(self, stops: Sequence[str], *, keep: bool = False) -> None:
        self._stops = tuple(stops)
        self._keep = keep
        self._overlap = max(map(len, stops), default=1) - 1
        """Characters of earlier pushes that a stop string may begin with."""
        self._text = ""
        """Those characters."""
        self._sent = 0
        """Characters at the start of `_text` that were returned."""
        self._exempt = 0
        """Characters at the start of `_text` in which no stop string may end."""

    def push(self, text: str, *, can_stop: bool = True) -> StopOutput:
        """`can_stop=False` (below min_tokens): no stop string may end within `text`."""
        if not self._stops:
            return StopOutput(text)
        self._text += text
        if not can_stop:
            self._exempt = len(self._text)
        first = self._first()
        if first is not None:
            end, stop = first
            out = self._text[self._sent : end if self._keep else end - len(stop)]
            self._text, self._sent = "", 0
            return StopOutput(out, stop)
        safe = max(self._sent, len(self._text) - self._overlap * (not self._keep))
        out = self._text[self._sent : safe]
        begin = max(0, len(self._text) - self._overlap)
        self._text = self._text[begin:]
        self._sent, self._exempt = safe - begin, max(0, self._exempt - begin)
        return StopOutput(out)

    def flush(self) -> str:
        """The text that was held back; to be called after the last token."""
        tail, self._text, self._sent = self._text[self._sent :], "", 0
        return tail

    def _first(self) -> tuple[int, str] | None:
        """End and text of the stop string that ends first; of two, the first listed."""
        matches = []
        for order, stop in enumerate(self._stops):
            start = self._text.find(stop, max(0, self._exempt - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), order, stop))
        if not matches:
            return None
        end, _, stop = min(matches)
        return end, stop
