"""Asks vLLM's render endpoint for a prompt's token ids: its chat template, its tokenizer, its media
hashes.

    POST /v1/completions/render, /v1/chat/completions/render, /v1/messages/render,
         /v1/responses/render
    ─► {"token_ids", "cache_salt", "features": {"mm_hashes", "mm_placeholders"}}

`vllm serve` offers it, and so does `vllm launch render`, which needs no GPU.
"""

import io
from typing import Annotated, Final

import aiohttp
import msgspec
from msgspec import Raw

from tandem_contract.request_kinds import PATHS, RequestKind

from ..block_keys import MediaItem, TokenizedPrompt
from . import NotTokenized

_KINDS: Final = (
    *(RequestKind.COMPLETIONS, RequestKind.CHAT, RequestKind.MESSAGES),
    RequestKind.RESPONSES,
)
_MAX_CONNECTIONS: Final = 16


class _Placeholders(msgspec.Struct):
    offset: int
    length: int


class _RenderedMedia(msgspec.Struct):
    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[_Placeholders]]


class _Rendered(msgspec.Struct):
    token_ids: list[Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]]
    """Of more than 32 bits no block of an engine is."""
    cache_salt: str | None = None
    features: _RenderedMedia | None = None


_one: Final = msgspec.json.Decoder(_Rendered)
_several: Final = msgspec.json.Decoder(list[_Rendered])
_members: Final = msgspec.json.Decoder(dict[str, Raw])


class RenderClient:
    """A client of one render endpoint; its caller sets a deadline."""

    def __init__(self, url: str, model: str) -> None:
        """`model` replaces the model of requests, whose LoRA adapter the endpoint may not know;
        empty: requests keep theirs."""
        self._url, self._model = url.rstrip("/"), model
        self._session: aiohttp.ClientSession | None = None

    async def tokenize(self, kind: RequestKind, body: bytes) -> TokenizedPrompt:
        """Token ids of the prompt in `body`. Raises NotTokenized."""
        if kind not in _KINDS:
            raise NotTokenized(f"there is no render endpoint for requests of kind {kind}")
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=_MAX_CONNECTIONS)
            )
        url = f"{self._url}{PATHS[kind]}/render"
        headers = {"content-type": "application/json"}
        try:
            # A file, because aiohttp warns about large bodies given as bytes.
            data = io.BytesIO(self._with_model(body))
            async with self._session.post(url, data=data, headers=headers) as response:
                answer = await response.read()
            if response.status != 200:
                raise NotTokenized(f"{url} answered {response.status}")
            if kind is RequestKind.COMPLETIONS:
                rendered, *others = _several.decode(answer)
                if others:
                    raise NotTokenized("the body holds several prompts")
            else:
                rendered = _one.decode(answer)
            media = _media(rendered.features)
        except (aiohttp.ClientError, OSError) as err:
            raise NotTokenized(f"{url} does not answer: {type(err).__name__}") from err
        except (msgspec.MsgspecError, ValueError, RecursionError) as err:
            raise NotTokenized(f"{url}: an answer that is not understood") from err
        return TokenizedPrompt(rendered.token_ids, cache_salt=rendered.cache_salt, media=media)

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    def _with_model(self, body: bytes) -> bytes:
        if not self._model:
            return body
        model = Raw(msgspec.json.encode(self._model))
        return msgspec.json.encode({**_members.decode(body), "model": model})


def _media(features: _RenderedMedia | None) -> tuple[MediaItem, ...]:
    """The media items in the order in which their placeholders stand in the prompt. Raises
    ValueError unless each has one."""
    if features is None:
        return ()
    items = [
        MediaItem(identifier, place.offset, place.length)
        for modality, hashes in features.mm_hashes.items()
        for identifier, place in zip(
            hashes, features.mm_placeholders.get(modality, ()), strict=True
        )
    ]
    return tuple(sorted(items, key=lambda item: item.offset))
