"""Endpoints that generate nothing: tokenize, detokenize, model list, metrics, version."""

import time
from importlib.metadata import version
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry

from tandem_contract import endpoints
from tandem_contract.metrics_text import metrics_text

from .body import ApiError, convert, decode_json
from .intake import BODY
from .long_work import work_on
from .protocol import check_token_ids
from .served_model import ServedModel


class TokenizeBody(msgspec.Struct):
    """Body of `/tokenize`: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    """None: as the completion or chat endpoint does."""
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct):
    """Body of `/detokenize`."""

    tokens: list[int]
    model: str | None = None


def info_routes(model: ServedModel, registry: CollectorRegistry) -> list[web.RouteDef]:
    """Routes of these endpoints for `model`; handlers raise `ApiError`."""
    info = _Info(model, registry)
    return [
        web.post("/tokenize", info.tokenize),
        web.post("/detokenize", info.detokenize),
        web.get(endpoints.MODELS, info.models),
        web.get(endpoints.METRICS, info.metrics),
        web.get("/version", info.version),
    ]


class _Info:
    def __init__(self, model: ServedModel, registry: CollectorRegistry) -> None:
        self._model = model
        self._registry = registry
        self._created = int(time.time())

    async def tokenize(self, http: web.Request) -> web.Response:
        data = http[BODY]
        return await work_on(len(data), self._tokenize, data)

    def _tokenize(self, data: bytes) -> web.Response:
        body = convert(decode_json(data), TokenizeBody)
        self._model.check_name(body.model)
        chat = body.messages is not None
        if (body.prompt is None) != chat:
            raise ApiError(400, "give either prompt or messages", param="prompt")
        text = body.prompt or ""
        if body.messages is not None:
            generation = body.add_generation_prompt is not False
            text = self._model.render(body.messages, {"add_generation_prompt": generation})
        special = (not chat) if body.add_special_tokens is None else body.add_special_tokens
        tokens = self._model.encode(text, add_special_tokens=special)
        names = None
        if body.return_token_strs:
            names = [self._model.tokenizer.token_text(i) for i in tokens]
        return _json(
            {
                "count": len(tokens),
                "max_model_len": self._model.max_model_len,
                "tokens": tokens,
                "token_strs": names,
            }
        )

    async def detokenize(self, http: web.Request) -> web.Response:
        data = http[BODY]
        return await work_on(len(data), self._detokenize, data)

    def _detokenize(self, data: bytes) -> web.Response:
        body = convert(decode_json(data), DetokenizeBody)
        self._model.check_name(body.model)
        check_token_ids(body.tokens, self._model.vocab_size, "tokens")
        text = self._model.tokenizer.decode(body.tokens, skip_special_tokens=False)
        return _json({"prompt": text})

    async def models(self, _: web.Request) -> web.Response:
        return _json(
            {
                "object": "list",
                "data": [
                    {
                        "id": name,
                        "object": "model",
                        "created": self._created,
                        "owned_by": "tandem",
                        "root": self._model.root,
                        "parent": None,
                        "max_model_len": self._model.max_model_len,
                    }
                    for name in self._model.names
                ],
            }
        )

    async def metrics(self, _: web.Request) -> web.Response:
        page = await metrics_text(self._registry)
        return web.Response(body=page, headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def version(self, _: web.Request) -> web.Response:
        return _json({"version": version("tandem-llm")})


def _json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")
