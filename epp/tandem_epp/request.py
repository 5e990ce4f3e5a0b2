"""Parse what a pick depends on: model, prompt length, prefix chain, and what rules out a split.

Only the few fields below are decoded; everything else passes through unread, and messages are
hashed as the bytes they came in. A body the engine would refuse for another reason is not refused
here: the engine's own message is better.

Errors: `BadRequest`, for the client: what is wrong and where in the body.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

import msgspec

from tandem_contract.prefix import BYTES_PER_TOKEN, text_chain, token_bytes
from tandem_contract.transfer_params import CLIENT_FORBIDDEN

from .ext_proc.messages import HttpRequest


class BadRequest(ValueError):
    """The body is no request of its kind (400)."""


class Kind(StrEnum):
    """The endpoints whose prompts are understood; any other passes through."""

    COMPLETIONS = "/v1/completions"
    CHAT = "/v1/chat/completions"


class _Body(msgspec.Struct):
    model: str | None = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    tools: msgspec.Raw = msgspec.Raw()
    n: msgspec.Raw = msgspec.Raw()
    best_of: msgspec.Raw = msgspec.Raw()
    echo: msgspec.Raw = msgspec.Raw()
    prompt_logprobs: msgspec.Raw = msgspec.Raw()


class _AnyBody(msgspec.Struct):
    model: str | None = None


@dataclass(slots=True)
class InferenceRequest:
    """What the scheduler knows of one request."""

    model: str | None
    """None when the body names none: any backend may take it."""
    prompt: bytes
    """What is hashed: raw JSON of the text or messages, or four bytes per token id."""
    one_engine: str | None = None
    """Why this request must not be split, one word; None when it may be."""
    _chains: dict[int, list[int]] = field(default_factory=dict, repr=False)

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt: exact for token ids, bytes / BYTES_PER_TOKEN for text."""
        return -(-len(self.prompt) // BYTES_PER_TOKEN)

    def chain(self, block_tokens: int) -> list[int]:
        """The prefix chain in blocks of `block_tokens`, made once for each size asked for."""
        if (known := self._chains.get(block_tokens)) is None:
            salt = (self.model or "").encode()
            known = text_chain(self.prompt, block_tokens * BYTES_PER_TOKEN, salt)
            self._chains[block_tokens] = known
        return known


def parse_request(kind: Kind, body: bytes) -> InferenceRequest:
    """The request in `body`. Raises BadRequest."""
    try:
        fields = _decoder.decode(body)
        prompt, one_engine = _PARSERS[kind](fields)
    except msgspec.ValidationError as err:
        raise BadRequest(f"the body is not a {kind} request: {err}") from err
    except msgspec.DecodeError as err:
        at = "" if "(byte " in str(err) else f" (byte {len(body)})"
        raise BadRequest(f"the body is not JSON: {_cause(err)}{at}") from err
    except UnicodeDecodeError as err:
        raise BadRequest(f"the body is not UTF-8 (byte {err.start} of a string)") from err
    return InferenceRequest(fields.model, prompt, one_engine or _rule(fields))


def model_named(body: bytes) -> str | None:
    """The model that the JSON of any other request names; None when there is none to be had."""
    try:
        return _any_decoder.decode(body).model
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def kind_of(request: HttpRequest) -> Kind | None:
    """The kind of prompt the body holds; None for what passes through unread."""
    kind = _KINDS.get(request.path.partition("?")[0])
    return kind if kind is not None and is_json(request) else None


def is_json(request: HttpRequest) -> bool:
    """Whether `request` carries JSON."""
    media = request.headers.get("content-type", "application/json").partition(";")[0]
    return request.method == "POST" and media.strip().lower().endswith(("/json", "+json"))


def is_bare(request: HttpRequest, body: bytes) -> bool:
    """Whether an engine may have `request` as it is, with no sidecar to take out what clients may
    not say. Of what is not read nobody knows."""
    if kind_of(request) is None:
        return request.method in ("GET", "HEAD")
    try:
        return _SIDECARS.isdisjoint(_members.decode(body))
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False


_KINDS: Final[Mapping[str, Kind]] = {kind.value: kind for kind in Kind}
_any_decoder: Final = msgspec.json.Decoder(_AnyBody)
_decoder: Final = msgspec.json.Decoder(_Body)
_ids: Final = msgspec.json.Decoder(list[int])
_members: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])
_SIDECARS: Final = CLIENT_FORBIDDEN | {"vllm_xargs"}
"""vLLM keeps the members of vllm_xargs beside kv_transfer_params."""
_lists: Final = msgspec.json.Decoder(list[msgspec.Raw])

_NEUTRAL: Final = {
    "n": (b"", b"null", b"1"),
    "best_of": (b"", b"null", b"1"),
    "echo": (b"", b"null", b"false"),
    "prompt_logprobs": (b"", b"null"),
}
"""Fields that keep a request on one engine, and the values under which they do not."""

_MEDIA: Final = (b'"image_url"', b'"input_audio"', b'"video_url"', b'"audio_url"')
"""Keys of content parts that both engines would fetch; inside a text the quotes are escaped."""


def _cause(err: msgspec.DecodeError) -> str:
    return str(err).removeprefix("JSON is malformed: ")


def _rule(fields: _Body) -> str | None:
    for name, neutral in _NEUTRAL.items():
        if bytes(getattr(fields, name)) not in neutral:
            return name
    return None


def _chat(fields: _Body) -> tuple[bytes, str | None]:
    """Tools come first, as in the templates; the closing bracket is not part of the prefix."""
    messages = bytes(fields.messages)
    media = "multimodal" if any(key in messages for key in _MEDIA) else None
    return bytes(fields.tools) + messages.removesuffix(b"]"), media


def _completion(fields: _Body) -> tuple[bytes, str | None]:
    raw = bytes(fields.prompt)
    if not raw.startswith(b"["):
        return raw[1:-1], None
    inside = raw[1:].lstrip()[:1]
    if inside in (b'"', b"["):
        prompts = _lists.decode(raw)
        texts = [_one_prompt(bytes(prompt)) for prompt in prompts]
        return b"".join(texts), "batch" if len(texts) > 1 else None
    return _token_bytes(raw), None


def _one_prompt(raw: bytes) -> bytes:
    return _token_bytes(raw) if raw.startswith(b"[") else raw[1:-1]


def _token_bytes(raw: bytes) -> bytes:
    ids = _ids.decode(raw)
    try:
        return token_bytes(ids)
    except OverflowError as err:
        raise BadRequest("prompt: token ids are whole numbers from 0 to 4294967295") from err


_PARSERS: Final[dict[Kind, Callable[[_Body], tuple[bytes, str | None]]]] = {
    Kind.COMPLETIONS: _completion,
    Kind.CHAT: _chat,
}
