"""Events that differ from an earlier one of their stream only in their text and their token ids.

Nearly all of a stream are, and each token of every stream passes here: to compare what lies around
the two takes a quarter of the time that it takes to look for each thing that an event may have.
"""

from typing import Final

_UNFINISHED: Final = b'"finish_reason":null'
_NO_LOGPROBS: Final = b'"logprobs":null'
_QUOTE: Final = b'"'
_QUOTE_BYTE: Final = 0x22
_ZERO: Final = 0x30
_NINE: Final = 0x39
_MAX_DIGITS: Final = 9
"""Of an id in 32 bits; one of ten digits is read like any other event."""
_OTHER: Final = (-1, 0, 0)
_ATTEMPTS: Final = 4
"""Events from which a form is taken: the first ones have the prompt's ids."""


class Form:
    """What all these events have before the text, between it and the ids, and after them."""

    def __init__(self) -> None:
        self.before = self.between = self.after = b""
        """Empty: no event had the form."""
        self.rest = b""
        """What replaces the list of ids and what follows it, for a client that gets no ids."""
        self._attempts = 0

    @property
    def is_known(self) -> bool:
        """Whether an event had the form."""
        return self.before != b""

    def learn(self, event: bytes, text: int, ids: int, end: int) -> None:
        """Take the form of `event`, whose text begins at `text` and whose ids are from `ids` to
        `end`, if later events may have it."""
        if self._attempts >= _ATTEMPTS or not 0 < text < ids:
            return
        end_of_text = event.find(_QUOTE, text)
        # An escaped quote ends no text; another event shows where it does.
        if event[end_of_text - 1 : end_of_text] == b"\\":
            return
        self._attempts += 1
        between = event[end_of_text:ids]
        # Another list would be logprobs, or the prompt's ids.
        if _UNFINISHED in between and _NO_LOGPROBS in between and b"[" not in event[end:]:
            self.before, self.between, self.after = event[:text], between, event[end:]
            self.rest = b"null" + event[end + 1 :]

    def token_of(self, data: bytes, start: int) -> tuple[int, int, int]:
        """The id of the event at `start`, where it begins, and where the event ends; -1 and twice
        0 if the event has another form, no text, or several ids."""
        # Loops and slices, because methods of bytes take their arguments in a tuple.
        text, size = start + len(self.before), len(data)
        if data[start:text] != self.before:
            return _OTHER
        # The quote of an escaped one is followed by more text.
        end = text
        while end < size and data[end] != _QUOTE_BYTE:
            end += 1
        first = end + len(self.between)
        if end == text or data[end:first] != self.between:
            return _OTHER
        token, end = 0, first
        while end < size and _ZERO <= data[end] <= _NINE:
            token = 10 * token + data[end] - _ZERO
            end += 1
        after = end + len(self.after)
        if not 0 < end - first <= _MAX_DIGITS or data[end:after] != self.after:
            return _OTHER
        return token, first, after
