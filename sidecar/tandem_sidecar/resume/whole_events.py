"""Divides the bytes of a stream into whole events."""

from collections.abc import Callable
from typing import Final

from ..bodies.parse import UNREADABLE
from .errors import StreamBroken

MALFORMED: Final = (*UNREADABLE, ValueError, OverflowError)
"""What reading an event raises that is none of the API's: JSON that does not decode or has other
types (`event_shapes`), token ids that are no numbers, and numbers that are too large."""
_END: Final = b"\n\n"
MAX_EVENT: Final = 16 * 1024 * 1024
"""Largest event, in bytes: the first one repeats the prompt's ids."""


class WholeEvents:
    """The events of one engine's stream."""

    def __init__(self) -> None:
        self.unread = b""
        """The beginning of an event."""

    def take(self, payload: bytes, read: Callable[[bytes], bytes]) -> bytes:
        """What `read` makes of each event that is complete now; `payload` are the newest bytes,
        without chunked coding.

        Raises StreamBroken for an event that ends the stream early; it has those before.
        """
        data = self.unread + payload if self.unread else payload
        if b"\r" in data:
            # Both end a line of an event, and JSON has neither within a string.
            data = data.replace(b"\r\n", b"\n")
        end = data.rfind(_END) + len(_END)
        if end < len(_END):
            self.unread = data
            if len(data) > MAX_EVENT:
                raise StreamBroken(f"an event of more than {MAX_EVENT} bytes")
            return b""
        self.unread, data = data[end:], data[:end]
        events: list[bytes] = []
        try:
            # Mostly one event.
            if data.find(_END) == end - len(_END):
                return read(data)
            for event in data.split(_END)[:-1]:
                events.append(read(event + _END))
        except StreamBroken as err:
            err.before = b"".join(events)
            raise
        except MALFORMED as err:
            # Without what it says, which may be of the answer.
            problem = f"an event cannot be read ({type(err).__name__})"
            raise StreamBroken(problem, b"".join(events)) from err
        return b"".join(events)

    def forget(self) -> None:
        """Forget the beginning of an event whose end does not come."""
        self.unread = b""
