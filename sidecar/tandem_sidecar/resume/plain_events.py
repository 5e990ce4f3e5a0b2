"""Events that differ from an earlier one of their stream only in their text and their token ids.

Nearly all of a stream are, and each token of every stream passes here: to compare what lies around
the two takes a quarter of the time that it takes to look for each thing that an event may have.
"""

from typing import Final

_UNFINISHED: Final = b'"finish_reason":null'
_NO_LOGPROBS: Final = b'"logprobs":null'
_QUOTE: Final = b'"'
_LIST_END: Final = ord("]")
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

    def ids_of(self, data: bytes, start: int) -> tuple[int, int]:
        """Where the ids of the event at `start` begin and end; 0 and 0 if it has another form, or
        no text."""
        text = start + len(self.before)
        # Slices, because methods of bytes take their arguments in a tuple.
        if data[start:text] != self.before:
            return 0, 0
        # The quote of an escaped one is followed by more text.
        end = data.find(_QUOTE, text)
        ids = end + len(self.between)
        if end <= text or data[end:ids] != self.between:
            return 0, 0
        end, size = ids, len(data)
        while end < size and data[end] != _LIST_END:
            end += 1
        return (
            (ids, end) if end > ids and data[end : end + len(self.after)] == self.after else (0, 0)
        )
