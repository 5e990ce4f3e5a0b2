"""Decodes a request body and checks its `kv_transfer_params`.

Pure. Errors: `ApiError`, with the HTTP status and the field that is wrong.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from tandem_contract import body_coding
from tandem_contract.concurrent_params import STREAM, PrefillStream
from tandem_contract.headers import KV_CONTRADICTED
from tandem_contract.kv_reference import (
    REFERENCE,
    STORE,
    KvReferenceUnusable,
    LoadLeg,
    StoreLeg,
    load_leg,
)
from tandem_contract.transfer_params import (
    FIELD,
    PROMPT_TOKEN_IDS,
    ParamsUnusable,
    transfer_params_from_object,
)

from .types import KvTransfer, PromptContradictsKv, RemoteDecode, RequestRejected

T = TypeVar("T")
_HIGHEST_PORT: Final = 65535
_CONTENT_ENCODING: Final = body_coding.CONTENT_ENCODING.encode()


class ApiError(Exception):
    """The request cannot be served: `status` and `message` are the answer, `param` the field, and
    `headers` are added."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = headers or {}


def rejection(err: RequestRejected) -> ApiError:
    """The answer to a request that the engine does not take."""
    if isinstance(err, PromptContradictsKv):
        return ApiError(400, str(err), param=FIELD, headers={KV_CONTRADICTED: "1"})
    return ApiError(400, str(err))


def check_coding(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raise ApiError if `headers` name a coding that has to be undone to read the body."""
    for name, value in headers:
        name, text = name.lower(), value.decode("latin-1")
        if name == _CONTENT_ENCODING and body_coding.is_coded(text):
            raise ApiError(
                body_coding.REFUSED_STATUS,
                body_coding.REFUSED_MESSAGE,
                headers=dict((body_coding.ACCEPTED,)),
            )
        # aiohttp refuses what does not end with chunked, and leaves the other codings as they are.
        if name == b"transfer-encoding" and text.strip().lower() != "chunked":
            raise ApiError(501, "a transfer coding other than chunked is not supported")


def decode_json(body: bytes) -> dict[str, Any]:
    """The JSON object in `body`. Raises ApiError with the line and column of the error."""
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
        raise ApiError(400, _why_not_json(body, err)) from err
    if not isinstance(decoded, dict):
        raise ApiError(400, "the request body is not a JSON object")
    return decoded


def _why_not_json(body: bytes, error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the request body is nested too deeply"
    if isinstance(error, msgspec.ValidationError):
        # The only one of a decoder without a type; Python's parser refuses it by another error.
        return "the request body has a number that is out of range"
    try:
        text = body.decode()
    except UnicodeDecodeError as err:
        return f"the request body is not UTF-8: {_position(body, err.start)}"
    try:
        # The standard library reports line and column; msgspec does for some errors only.
        json.loads(text)
    except json.JSONDecodeError as err:
        return (
            f"the request body is not JSON: {err.msg.lower()}"
            f" at line {err.lineno}, column {err.colno}"
        )
    # Only msgspec refuses this text: its message has a byte offset instead of line and column.
    match = re.search(r" ?\(byte (\d+)\)", str(error))
    if match is None:
        return f"the request body is not JSON: {error}"
    reason = str(error).replace(match[0], "")
    return f"the request body is not JSON: {reason} at {_position(body, int(match[1]))}"


def _position(body: bytes, offset: int) -> str:
    before = body[:offset]
    line_start = before.rfind(b"\n") + 1
    line = before.count(b"\n") + 1
    return f"line {line}, column {offset - line_start + 1}"


def parse_kv_transfer(body: Mapping[str, Any]) -> KvTransfer:
    """The request's part in a hand-off: its KV is kept, pulled, stored, loaded, or none of these.

    Raises ApiError when `kv_transfer_params` ask to keep and to pull it, or name no KV that can be
    pulled or loaded.
    """
    value = body.get(FIELD)
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ApiError(400, f"{FIELD} is not an object", param=FIELD)
    if STORE in value:
        return convert(value[STORE], StoreLeg, f"{FIELD}.{STORE}")
    if REFERENCE in value:
        return _load_leg(value)
    pull, keep = value.get("do_remote_prefill"), value.get("do_remote_decode")
    if pull and keep:
        raise ApiError(
            400,
            f"{FIELD} asks for do_remote_prefill and do_remote_decode: one leg does one",
            param=FIELD,
        )
    if keep:
        return RemoteDecode(_stream_id(value))
    # A decode leg that is sent before the prefill's answer does not ask for `do_remote_prefill`.
    if not pull and STREAM not in value:
        return None
    try:
        params = transfer_params_from_object(value)
    except ParamsUnusable as err:
        raise ApiError(400, f"{err}: nothing can be pulled", param=FIELD) from err
    if not 0 < params.remote_port <= _HIGHEST_PORT:
        raise ApiError(
            400,
            f"{FIELD}.remote_port is {params.remote_port}",
            param=FIELD,
        )
    return params


def _load_leg(value: Mapping[str, Any]) -> LoadLeg:
    try:
        return load_leg(value)
    except KvReferenceUnusable as err:
        raise ApiError(400, f"{FIELD}.{err}", param=FIELD) from err


def _stream_id(value: Mapping[str, Any]) -> str | None:
    if STREAM not in value:
        return None
    return convert(value[STREAM], PrefillStream, f"{FIELD}.{STREAM}").id


def prompt_token_ids(body: Mapping[str, Any]) -> tuple[int, ...]:
    """The prompt's token ids, used instead of a chat's messages, as in vLLM; () for none.

    Raises ApiError when they are not ids.
    """
    ids = (body.get(FIELD) or {}).get(PROMPT_TOKEN_IDS)
    return tuple(convert(ids or [], list[int], f"{FIELD}.{PROMPT_TOKEN_IDS}"))


def convert(value: Any, kind: type[T], name: str = "") -> T:
    """`value` as `kind`. Raises ApiError naming the field; `name` is the field of `value`."""
    try:
        return msgspec.convert(value, type=kind)
    except msgspec.ValidationError as err:
        # msgspec ends its message with the path of the wrong value.
        message, _, path = str(err).partition(" - at `")
        place = (name + path.rstrip("`").removeprefix("$")).removeprefix(".") or "the request body"
        param = re.split(r"[.\[]", place)[0]
        text = message.replace("`", "").replace("Expected", "expected")
        raise ApiError(400, f"{place}: {text}", param=param) from err


_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "frequency_penalty": (0,),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logits_processors": ([],),
    "min_p": (0,),
    "presence_penalty": (0,),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields that this engine does not support → values (besides null) that have no effect."""


def refuse_unsupported(body: Mapping[str, Any]) -> None:
    """Raise ApiError when a field asks for something that this engine does not do."""
    for name, neutral in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in neutral:
            raise ApiError(400, f"{name} is not supported by this engine", param=name)
