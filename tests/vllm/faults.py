"""A real vLLM whose store fails on demand, and what its prompts must answer meanwhile."""

import asyncio
import itertools
import os
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import msgspec
import xxhash

from tandem_contract import vllm_storage as names
from tandem_contract.commandline import HostPort
from tandem_kvstore.errors import Reason

from ..chaos.toxiproxy import Toxiproxy
from ..kvstore.servers import Server
from .engines import MODEL_NAME, metric
from .single import SingleVllm
from .storage import CHUNK

PROXY: Final = "store"
CHUNKS: Final = 5
"""Full chunks of each prompt."""
_LOADED: Final = f"{names.LOADED_TOKENS}_total"
_STORED: Final = f"{names.STORED_TOKENS}_total"
_NOT_LOADED: Final = f"{names.NOT_LOADED_CHUNKS}_total"
_NOT_STORED: Final = f"{names.NOT_STORED_CHUNKS}_total"
_HITS: Final = "vllm:external_prefix_cache_hits_total"
"""Tokens for which vLLM began a load."""
_seeds: Final = itertools.count(19)


async def behind_proxy(proxies: Toxiproxy, server: Server) -> str:
    """The endpoint of a proxy before the store."""
    host, _, port = server.location.endpoint.removeprefix("http://").rpartition(":")
    return f"http://{await proxies.before(PROXY, HostPort(host, int(port)))}"


@dataclass(frozen=True)
class StoredPrompt:
    """A prompt that is in the store, and how it goes on."""

    tokens: list[int]
    answer: list[int]
    manifest: Path
    """The file of its first chunk's manifest."""

    @property
    def data(self) -> Path:
        """The file of that chunk's only layer group."""
        (file,) = self.manifest.parent.glob(f"{self.manifest.name}-*")
        return file


@dataclass
class FaultyStorage:
    """An engine, and the store behind it."""

    engine: SingleVllm
    http: aiohttp.ClientSession
    proxies: Toxiproxy
    objects: Path
    """The directory of the store's objects."""

    async def complete(self, tokens: Sequence[int]) -> list[int]:
        """The ids of the tokens that the engine answers, with an empty prefix cache before."""
        async with self.http.post(f"{self.engine.url}/reset_prefix_cache") as answer:
            assert answer.status == 200, await answer.text()
        body = {
            "model": MODEL_NAME, "prompt": list(tokens), "max_tokens": 8, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        async with self.http.post(f"{self.engine.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            [choice] = (await answer.json())["choices"]
        return list(choice["token_ids"])

    async def stored_prompt(self) -> StoredPrompt:
        """A new prompt, which the engine has computed and stored."""
        before = self._manifests()
        tokens = random.Random(next(_seeds)).choices(range(4, 190), k=CHUNKS * CHUNK + 9)
        answer: list[int] = []
        # The circuit breaker may still be open from an earlier fault, and then nothing is stored.
        while len(new := self._manifests() - before) < CHUNKS:
            begun = await self._chunks_written()
            again = await self.complete(tokens)
            assert again == (answer or again)
            answer = again
            while await self._chunks_written() < begun + CHUNKS and not self._has_all(before):
                await asyncio.sleep(0.05)
        first = min(new, key=_token_count)
        return StoredPrompt(tokens, answer, first)

    async def ask(self, prompt: StoredPrompt) -> None:
        """The engine answers as it did before, wherever the KV comes from."""
        assert await self.complete(prompt.tokens) == prompt.answer

    async def ask_until_not_loaded(self, prompt: StoredPrompt, *reasons: Reason) -> None:
        """Ask until chunks were not loaded for one of the reasons."""
        before = await self._not_loaded(reasons)
        while await self._not_loaded(reasons) == before:
            await self.ask(prompt)

    async def ask_until_loaded(self, prompt: StoredPrompt) -> None:
        """Ask until as many tokens were loaded as the prompt has in full chunks. The cost model may
        compute it at first: it tries a store that seems slow every ten seconds."""
        before = await self.value(_LOADED)
        while await self.value(_LOADED) < before + CHUNKS * CHUNK:
            await self.ask(prompt)

    async def ask_until_a_load_fails(self, prompt: StoredPrompt) -> None:
        """Ask until vLLM began a load that did not bring the KV: the request was waiting for it,
        with its blocks, and was computed after all."""
        before = await self.value(_HITS) - await self.value(_LOADED)
        while await self.value(_HITS) - await self.value(_LOADED) == before:
            await self.ask(prompt)

    async def value(self, name: str, **labels: str) -> float:
        """A metric of the engine."""
        return metric(await self.engine.metrics(self.http), name, **labels)

    @asynccontextmanager
    async def toxic(self, kind: str, **attributes: int) -> AsyncIterator[None]:
        """The network before the store is bad."""
        await self.proxies.poison(PROXY, kind, **attributes)
        try:
            yield
        finally:
            await self.proxies.cure(PROXY, kind)

    @asynccontextmanager
    async def down(self) -> AsyncIterator[None]:
        """The store refuses connections, and those that were open are cut."""
        await self.proxies.enable(PROXY, False)
        try:
            yield
        finally:
            await self.proxies.enable(PROXY, True)

    async def _not_loaded(self, reasons: Sequence[Reason]) -> float:
        page = await self.engine.metrics(self.http)
        return sum(metric(page, _NOT_LOADED, reason=reason.value) for reason in reasons)

    async def _chunks_written(self) -> float:
        """Chunks that were stored, or were not for a reason that was counted."""
        page = await self.engine.metrics(self.http)
        return metric(page, _STORED) / CHUNK + metric(page, _NOT_STORED)

    def _manifests(self) -> set[Path]:
        return {path for path in self.objects.glob("?" * 64) if path.is_file()}

    def _has_all(self, before: set[Path]) -> bool:
        return len(self._manifests() - before) >= CHUNKS


def lose_manifest(prompt: StoredPrompt) -> None:
    prompt.manifest.unlink()


def write_older_format(prompt: StoredPrompt) -> None:
    _rewrite(prompt, "format", "tandem-kv/0")


def write_other_layout(prompt: StoredPrompt) -> None:
    """The identity has the layout."""
    _rewrite(prompt, "identity", "0" * 64)


def damage_data(prompt: StoredPrompt) -> None:
    data = bytearray(prompt.data.read_bytes())
    data[-1] ^= 1
    prompt.data.write_bytes(data)


def truncate_data(prompt: StoredPrompt) -> None:
    os.truncate(prompt.data, prompt.data.stat().st_size - 1)


def lose_data(prompt: StoredPrompt) -> None:
    prompt.data.unlink()


def _rewrite(prompt: StoredPrompt, name: str, value: str) -> None:
    """Write a manifest that is right but for one field."""
    manifest = _manifest(prompt.manifest)
    assert name in manifest
    raw = msgspec.json.encode({**manifest, name: value})
    checksum = xxhash.xxh3_128_hexdigest(raw)
    prompt.manifest.write_bytes(
        msgspec.json.encode({"checksum": checksum, "manifest": msgspec.Raw(raw)})
    )


def _token_count(file: Path) -> int:
    return int(str(_manifest(file)["token_count"]))


def _manifest(file: Path) -> dict[str, object]:
    document = msgspec.json.decode(file.read_bytes(), type=dict[str, object])
    manifest = document["manifest"]
    assert isinstance(manifest, dict)
    return manifest
