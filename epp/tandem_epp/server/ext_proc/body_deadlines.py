"""The time that requests have for their bodies: one timer for all of them, not one for each."""

import asyncio
from typing import Final, Protocol

BODY_SECONDS: Final = 60.0
"""Seconds from a request's headers to the end of its body. Too low: clients with a slow line are
refused; 16 MiB in a minute take 2.2 Mbit/s. Too high: stalled uploads keep others out for long."""


class Upload(Protocol):
    """A request whose body is awaited."""

    def expire_body(self) -> None:
        """The time is over. Without effect if the body is complete."""


class BodyDeadlines:
    """Uploads in the order in which their time ends, since all have equally long.

    An upload that completes stays here until its time or its stream ends, whichever is first, so
    that a request costs one entry and no look.
    """

    def __init__(self, seconds: float = BODY_SECONDS) -> None:
        self._seconds = seconds
        self._deadlines: dict[Upload, float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        """Kept, because each `get_running_loop` of Python 3.11 makes a system call, getpid."""

    def __len__(self) -> int:
        return len(self._deadlines)

    def start(self, upload: Upload) -> None:
        """The time of `upload` begins."""
        if (loop := self._loop) is None:
            self._loop = loop = asyncio.get_running_loop()
        self._deadlines[upload] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_later(self._seconds, self._expire)

    def forget(self, upload: Upload) -> None:
        """The stream of `upload` has ended."""
        self._deadlines.pop(upload, None)

    def close(self) -> None:
        """Forget all uploads."""
        self._deadlines.clear()
        if self._timer is not None:
            self._timer.cancel()

    def _expire(self) -> None:
        loop, self._timer = asyncio.get_running_loop(), None
        now = loop.time()
        due = [upload for upload, deadline in self._deadlines.items() if deadline <= now]
        for upload in due:
            self._deadlines.pop(upload, None)
            upload.expire_body()
        if self._deadlines:
            first = next(iter(self._deadlines.values()))
            self._timer = loop.call_at(first, self._expire)
