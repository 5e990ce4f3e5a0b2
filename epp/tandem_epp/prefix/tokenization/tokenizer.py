"""Token ids of requests' prompts: cached, off the event loop, and with a deadline.

    tokenizer = PromptTokenizer(TokenizerSettings(directory="/models/llama"), metrics)
    prompt = await tokenizer.tokenize(kind, body)      None: the request is placed without

A prompt that misses its deadline is tokenized to its end all the same, so that its next turn or
retry finds it in the cache.
"""

import asyncio
import logging
from array import array
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Final

import xxhash

from tandem_contract.prompt_length import ANY_VOCABULARY, TokenSizes
from tandem_contract.request_kinds import RequestKind

from ..block_keys import TokenizedPrompt
from . import NotTokenized
from .local import LocalTokenizer
from .render import RenderClient
from .source import given_ids, named_model, text_prompt

THREADS: Final = 2
"""Worker threads for local tokenizers; each tokenizes several megabytes per second."""
MAX_PENDING: Final = 64
"""Prompts being tokenized at once; further ones are placed without, instead of waiting."""
MAX_BODY_BYTES: Final = 4 << 20
"""Larger bodies, about a million tokens, would take longer to tokenize than any deadline; as token
ids, to decode them would delay all other requests."""
_ENTRY_BYTES: Final = 512
"""Bytes per cached prompt beside its token ids."""
_MEDIA: Final = (b'"image_url"', b'"input_image"', b'"video_url"', b'"input_audio"')
SEEDS: Final = {kind: xxhash.xxh3_64_intdigest(kind.encode()) for kind in RequestKind}
"""The same body has another prompt as a request of another kind."""
_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizerSettings:
    """How prompts are tokenized."""

    directory: str = ""
    """A model directory with tokenizer.json; empty: the render endpoint tokenizes."""
    url: str = ""
    """Base URL of vLLM's render endpoint; empty, without a directory: only prompts that come as
    token ids are known exactly."""
    model: str = ""
    """The model's name for the render endpoint. Requests for other models use a LoRA adapter of
    that name. Empty: requests keep their model, and none has an adapter."""
    adapters: tuple[str, ...] = ()
    """Names of the model's LoRA adapters; needed only beside tokenizers of other models, which
    might have them instead."""
    deadline: float = 0.2
    """Seconds after which a request is placed without its token ids. Too low: long prompts are
    matched approximately. Too high: an overloaded tokenizer delays requests."""
    media_deadline: float = 2.0
    """The same for requests with media, which the render endpoint downloads and decodes."""
    cache_bytes: int = 64 << 20
    """Bytes of cached token ids, four per token."""


class PromptTokenizer:
    """Tokenizes with one configuration, on one event loop."""

    def __init__(self, settings: TokenizerSettings, observe: Callable[[str, float], None]) -> None:
        """`observe` takes the result of each prompt and its seconds: `given` (token ids came with
        the request), `cached`, `tokenized`, `late` (past the deadline), `refused` (not a prompt
        that can be tokenized, or the endpoint does not answer), `busy` (too many at once). Raises
        TokenizerUnusable."""
        self._settings, self._observe = settings, observe
        self._local = LocalTokenizer(Path(settings.directory)) if settings.directory else None
        self._render = RenderClient(settings.url, settings.model) if settings.url else None
        self._threads = ThreadPoolExecutor(THREADS, "tokenize") if self._local else None
        self._cache: OrderedDict[bytes, TokenizedPrompt] = OrderedDict()
        self._cache_bytes = 0
        self._pending: dict[bytes, asyncio.Task[TokenizedPrompt | None]] = {}

    @property
    def sizes(self) -> TokenSizes:
        """What no token exceeds."""
        return ANY_VOCABULARY if self._local is None else self._local.sizes

    async def tokenize(self, kind: RequestKind, body: bytes) -> TokenizedPrompt | None:
        """The prompt's token ids; None when it cannot be tokenized, or not in time."""
        started = perf_counter()
        result, prompt = await self._tokenize(kind, body)
        self._observe(result, perf_counter() - started)
        base = self._settings.model
        if prompt is None or not base or (model := named_model(body)) in (None, base):
            return prompt
        return replace(prompt, adapter=model)

    async def close(self) -> None:
        """Stop tokenizing."""
        for task in self._pending.values():
            task.cancel()
        await asyncio.gather(*self._pending.values(), return_exceptions=True)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
        if self._render is not None:
            await self._render.close()

    async def _tokenize(self, kind: RequestKind, body: bytes) -> tuple[str, TokenizedPrompt | None]:
        if len(body) > MAX_BODY_BYTES:
            return "refused", None
        try:
            if (given := given_ids(kind, body)) is not None:
                return "given", given
        except NotTokenized:
            return "refused", None
        if self._local is None and self._render is None:
            return "refused", None
        key = xxhash.xxh3_128_digest(body, SEEDS[kind])
        if (cached := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return "cached", cached
        return await self._within_deadline(key, kind, body)

    async def _within_deadline(
        self, key: bytes, kind: RequestKind, body: bytes
    ) -> tuple[str, TokenizedPrompt | None]:
        # Of several requests with the same body at once, one is tokenized.
        if (task := self._pending.get(key)) is None:
            if len(self._pending) >= MAX_PENDING:
                return "busy", None
            task = self._pending[key] = asyncio.create_task(self._run(key, kind, body))
        has_media = any(word in body for word in _MEDIA)
        deadline = self._settings.media_deadline if has_media else self._settings.deadline
        done, _ = await asyncio.wait((task,), timeout=deadline)
        if not done:
            return "late", None
        return ("tokenized" if task.result() is not None else "refused"), task.result()

    async def _run(self, key: bytes, kind: RequestKind, body: bytes) -> TokenizedPrompt | None:
        try:
            prompt = await self._compute(kind, body)
        except NotTokenized as err:
            _log.debug("a prompt was not tokenized: %s", err)
            return None
        finally:
            del self._pending[key]
        self._store(key, prompt)
        return prompt

    def _compute(self, kind: RequestKind, body: bytes) -> Awaitable[TokenizedPrompt]:
        if self._local is None or self._threads is None:
            if self._render is None:
                raise NotTokenized("no tokenizer is configured")
            return self._render.tokenize(kind, body)
        loop = asyncio.get_running_loop()
        return loop.run_in_executor(self._threads, _tokenize_locally, self._local, kind, body)

    def _store(self, key: bytes, prompt: TokenizedPrompt) -> None:
        ids = array("I", prompt.token_ids)
        self._cache[key] = replace(prompt, token_ids=ids)
        self._cache_bytes += _size(prompt)
        while self._cache_bytes > self._settings.cache_bytes and self._cache:
            _, oldest = self._cache.popitem(last=False)
            self._cache_bytes -= _size(oldest)


def _tokenize_locally(local: LocalTokenizer, kind: RequestKind, body: bytes) -> TokenizedPrompt:
    return local.tokenize(text_prompt(kind, body))


def _size(prompt: TokenizedPrompt) -> int:
    return _ENTRY_BYTES + 4 * len(prompt.token_ids)
