"""Connections that have not shown yet that they are a peer's: bounded in number and time."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from .errors import PeerGone


class HandshakeLimit:
    """Admits every connection, and ends others for it: of the address that has most of them, the
    oldest. So clients without a key cannot keep peers out."""

    def __init__(self, most: int, seconds: float) -> None:
        """`most`: connections at a time; `seconds`: what each may take."""
        self._most, self._seconds = most, seconds
        self._under_way: dict[asyncio.Timeout, str | None] = {}
        """Time limit → remote address, the oldest first."""

    @asynccontextmanager
    async def admitted(self, remote: str | None) -> AsyncIterator[None]:
        """Raises PeerGone if the block takes too long, or when it must make room."""
        if len(self._under_way) >= self._most:
            self._make_room()
        try:
            async with asyncio.timeout(self._seconds) as limit:
                self._under_way[limit] = remote
                try:
                    yield
                finally:
                    self._under_way.pop(limit, None)
        except TimeoutError as err:
            raise PeerGone("the handshake took too long") from err

    def _make_room(self) -> None:
        ((busiest, _),) = Counter(self._under_way.values()).most_common(1)
        oldest = next(limit for limit, remote in self._under_way.items() if remote == busiest)
        # At once: the next connection must not choose it again.
        del self._under_way[oldest]
        if not oldest.expired():
            oldest.reschedule(asyncio.get_running_loop().time())
