"""Work on large bodies, in threads: decoding, rendering and tokenizing them takes seconds, in which
running streams and health checks must go on."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
_INLINE_BYTES: Final = 20_000
"""Bodies up to this size are worked on at once: a millisecond or two, less than the forward pass
that follows."""
_THREADS: Final = ThreadPoolExecutor(2, "long-work")
"""Two threads, so that one long prompt does not keep the others waiting, and so that the memory of
tokenizing, 300 bytes a token, is that of two prompts."""


async def work_on(size: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """`work(*args, **kwargs)` on a body of `size` bytes."""
    if size <= _INLINE_BYTES:
        return work(*args, **kwargs)
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(_THREADS, lambda: work(*args, **kwargs))
