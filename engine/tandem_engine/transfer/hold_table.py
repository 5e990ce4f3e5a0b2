"""The holds of a producer, by request id and by stream id.

Both legs of a streamed hand-off are sent at once, so its reader may come before the request: then
the stream has a hold without a request id, which `open` completes. Bookkeeping only, as in `holds`.
"""

from collections.abc import Iterator

from .holds import KvHold
from .wire import MAX_ID


class HoldTable:
    """Every hold that was opened and not removed, and every stream that a reader waits for."""

    def __init__(self, lease: float) -> None:
        """`lease`: of new holds, in seconds."""
        self._lease = lease
        self._requests: dict[str, KvHold] = {}
        self._streams: dict[str, KvHold] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[KvHold]:
        """The opened holds; the table may change meanwhile."""
        return iter(list(self._requests.values()))

    def get(self, request_id: str) -> KvHold | None:
        """The hold of an opened request. From any thread."""
        return self._requests.get(request_id)

    def find(self, identifier: str) -> KvHold | None:
        """The hold of a request or of a stream."""
        return self._requests.get(identifier) or self._streams.get(identifier)

    def has_stream(self, stream_id: str) -> bool:
        """Whether a request with this stream is open."""
        hold = self._streams.get(stream_id)
        return hold is not None and hold.request_id is not None and hold.end_reason is None

    def open(self, request_id: str, prompt_hash: str, stream_id: str | None) -> None:
        """Add a request's hold. Raises ValueError for an id that is in use, empty or too long."""
        if request_id in self._requests or not 0 < len(request_id) <= MAX_ID:
            raise ValueError(f"request id {request_id[:MAX_ID]!r} is open, empty or too long")
        if stream_id is None:
            self._requests[request_id] = KvHold(request_id, self._lease, prompt_hash=prompt_hash)
            return
        if self.has_stream(stream_id):
            raise ValueError(f"stream {stream_id!r} is open")
        hold = self._streams.get(stream_id)
        # The reader of an ended hold is being refused, so the request gets a new one.
        if hold is None or hold.end_reason is not None:
            hold = KvHold(request_id, self._lease, stream_id)
        hold.request_id, hold.prompt_hash = request_id, prompt_hash
        self._requests[request_id] = self._streams[stream_id] = hold
        # A waiting reader finds out whether its prompt is this one.
        hold.changed.set()

    def await_stream(self, stream_id: str) -> KvHold:
        """Add a hold for the reader of a stream whose request was not opened yet."""
        hold = self._streams[stream_id] = KvHold(None, self._lease, stream_id)
        return hold

    def remove(self, hold: KvHold) -> bool:
        """Forget a hold. Returns False if its request was not opened, or was removed before."""
        # Identity, not the id: after a discard, the same id may have been opened again.
        if hold.stream_id is not None and self._streams.get(hold.stream_id) is hold:
            del self._streams[hold.stream_id]
        if hold.request_id is None or self._requests.get(hold.request_id) is not hold:
            return False
        del self._requests[hold.request_id]
        return True

    def clear(self) -> None:
        """Forget every hold."""
        self._requests.clear()
        self._streams.clear()
