"""The parsers of engines, as functions from bytes to a reading; None: the engine refuses."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from typing import Any

import pydantic
import pydantic_core
import pytest
import python_multipart
import starlette.formparsers
from starlette.datastructures import Headers, UploadFile

from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import CLIENT_FORBIDDEN
from tandem_engine.body import ApiError, decode_json, parse_kv_transfer
from tandem_engine.protocol import parse_chat, parse_completion


@dataclass(frozen=True)
class EngineReading:
    """What an engine read of a body."""

    model: str | None
    stream: bool
    max_tokens: int | None
    n: int
    forbidden: tuple[str, ...]
    """Fields that a client may not set, wherever the engine finds them."""


class _Request(pydantic.BaseModel):
    """Fields of vLLM's requests, with its types; like them it keeps what it does not know."""

    model_config = pydantic.ConfigDict(extra="allow")
    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_output_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None
    sampling_params: dict[str, Any] | None = None


def _by_json_loads(body: bytes) -> Any:
    """Starlette's `request.json()`."""
    return json.loads(body)


JSON_PARSERS: Mapping[str, Callable[[bytes], Any]] = {
    "json.loads": _by_json_loads,
    "pydantic_core.from_json": pydantic_core.from_json,
}


def read_by_pydantic(
    kind: RequestKind, parse: Callable[[bytes], Any], body: bytes
) -> EngineReading | None:
    """As FastAPI does: the parsed object, converted to the fields' types."""
    try:
        members = parse(body)
        request = _Request.model_validate(members)
    except (ValueError, RecursionError):
        return None
    limits: tuple[int | None, ...] = (request.max_tokens,)
    if kind is RequestKind.CHAT:
        limits = (request.max_completion_tokens, *limits)
    elif kind is RequestKind.RESPONSES:
        limits = (request.max_output_tokens,)
    return EngineReading(
        request.model,
        bool(request.stream),
        next((limit for limit in limits if limit is not None), None),
        1 if request.n is None else request.n,
        tuple(forbidden_in(members)),
    )


def forbidden_in(members: Mapping[str, Any]) -> Iterator[str]:
    """The forbidden fields where vLLM looks for them."""
    sampling = members.get("sampling_params")
    inner = sampling.get("extra_args") if isinstance(sampling, dict) else None
    places = (members, members.get("vllm_xargs"), members.get("extra_args"), sampling, inner)
    for place in places:
        if isinstance(place, dict):
            yield from CLIENT_FORBIDDEN.intersection(place)


def read_by_torch_engine(kind: RequestKind, body: bytes) -> EngineReading | None:
    """Tandem's own engine."""
    parse = {RequestKind.COMPLETIONS: parse_completion, RequestKind.CHAT: parse_chat}[kind]
    try:
        members = decode_json(body)
        call = parse(members, parse_kv_transfer(members))
    except ApiError:
        return None
    forbidden = ("kv_transfer_params",) if call.kv is not None else ()
    return EngineReading(call.model, call.stream, call.max_tokens, call.n, forbidden)


@dataclass(frozen=True)
class FormReading:
    """What an engine read of a form."""

    names: frozenset[str]
    model: str | None
    """Of several fields the last one; None: there is none, or it is a file."""


def read_by_starlette(content_type: str, body: bytes) -> FormReading | None:
    """Starlette with the installed python-multipart, as in vLLM."""

    async def stream() -> AsyncIterator[bytes]:
        yield body

    async def parse() -> FormReading:
        parser = starlette.formparsers.MultiPartParser(
            Headers({"content-type": content_type}), stream()
        )
        form = await parser.parse()
        try:
            model = form.get("model")
            is_text = not isinstance(model, UploadFile)
            return FormReading(frozenset(form), model if is_text else None)
        finally:
            await form.close()

    # FastAPI hands only this type to the parser.
    if starlette.formparsers.parse_options_header(content_type)[0] != b"multipart/form-data":
        return None
    try:
        return asyncio.run(parse())
    except (starlette.formparsers.MultiPartException, ValueError, LookupError):
        return None


def _older_options(value: str | bytes | None) -> tuple[bytes, dict[bytes, bytes]]:
    """Options as python-multipart read them up to 0.0.20: by Python's parser of MIME headers."""
    message = Message()
    message["content-type"] = value.decode("latin-1") if isinstance(value, bytes) else value or ""
    (kind, _), *parameters = message.get_params() or [("", "")]
    options = {}
    for name, text in parameters:
        text = text[-1] if isinstance(text, tuple) else text
        options[name.encode("latin-1")] = text.encode("latin-1", "replace")
    return kind.encode("latin-1"), options


@contextmanager
def older_options() -> Iterator[None]:
    """Have Starlette read options as with an older python-multipart."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(starlette.formparsers, "parse_options_header", _older_options)
        yield


def read_by_python_multipart(content_type: str, body: bytes) -> FormReading | None:
    """python-multipart's own form parser, which also undoes transfer encodings."""
    fields: list[tuple[str, str | None]] = []

    def on_field(field: Any) -> None:
        value = field.value or b""
        fields.append((field.field_name.decode(), value.decode("utf-8", "replace")))

    def on_file(file: Any) -> None:
        fields.append(((file.field_name or b"").decode(), None))
        file.close()

    try:
        parser = python_multipart.create_form_parser(
            {"Content-Type": content_type.encode("latin-1")}, on_field, on_file
        )
        parser.write(body)
        parser.finalize()
        parser.close()
    except (python_multipart.exceptions.FormParserError, ValueError, KeyError):
        return None
    models = [value for name, value in fields if name == "model"]
    return FormReading(frozenset(name for name, _ in fields), models[-1] if models else None)
