"""Copies between host memory and a device's KV cache, beside the steps that compute.

Each copy runs on a CUDA stream of its own: on the default stream it would wait for all of a step
that is queued there. That is safe: a step has ended on the device when its worker thread returns,
so the blocks of all other sequences are at rest. For the layers of a running step there are events.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor


class CopyStream:
    """A stream for the copies of one thread; on the CPU copies just run, and nothing waits."""

    def __init__(self, device: torch.device) -> None:
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def queueing(self) -> AbstractContextManager[object]:
        """Copies in the block are queued on this stream."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def after(self, event: torch.cuda.Event) -> None:
        """Have what is queued from now on wait for `event`."""
        if self._stream is not None:
            self._stream.wait_event(event)

    def mark(self) -> torch.cuda.Event | None:
        """An event that is done with all that was queued so far."""
        return self._stream.record_event() if self._stream is not None else None

    def wait(self) -> None:
        """Wait until all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


@contextmanager
def copies_on(device: torch.device, after: torch.cuda.Event | None = None) -> Iterator[None]:
    """Queue the block's copies on a stream of their own, and wait for them at its end.

    `after`: what the copies wait for on the device.
    """
    stream = CopyStream(device)
    if after is not None:
        stream.after(after)
    try:
        with stream.queueing():
            yield
    # Also after an error: no copy may write into blocks that the caller gives back.
    finally:
        stream.wait()


def block_rows(layer: Tensor, block_bytes: int) -> Tensor:
    """A layer of the cache as bytes, [blocks, block_bytes]; in words, which are copied faster."""
    word = torch.int64 if block_bytes % 8 == 0 else torch.uint8
    return layer.detach().view(-1).view(word).view(len(layer), -1)


def block_ids(blocks: Sequence[int], device: torch.device) -> Tensor:
    """Ids on the device, as an index of `block_rows`."""
    ids = torch.tensor(blocks, dtype=torch.int64)
    return ids.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else ids


def host_rows(count: int, rows: Tensor) -> Tensor:
    """New host memory for `count` rows: page-locked for a device's, so that it can copy directly.

    torch keeps freed page-locked memory for the next call, because locking takes milliseconds.
    """
    shape = (count, rows.shape[1])
    return torch.empty(shape, dtype=rows.dtype, pin_memory=rows.device.type == "cuda")


def host_bytes(rows: Tensor) -> memoryview:
    """The bytes of contiguous rows in host memory."""
    return rows.view(torch.uint8).view(-1).numpy().data
