"""Reads from a request's body what a pick depends on: model, prompt, and what rules out a split.

Only the members needed are decoded; messages are hashed as the bytes in which they came. A body
that the engine would refuse for another reason is not refused here: the engine's own message is
better.

Errors: `BadBody`, for the client: what is wrong and where.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
from msgspec import Raw

from tandem_contract.prefix import BYTES_PER_TOKEN, text_chain, token_bytes
from tandem_contract.request_kinds import SAMPLING_PARAMS, RequestKind, kind_of_path
from tandem_contract.single_engine import single_engine_reason
from tandem_contract.transfer_params import CLIENT_FORBIDDEN

from .ext_proc.messages import HttpRequest

Members = Mapping[str, Raw]
"""The undecoded members of a JSON object."""


class BadBody(ValueError):
    """The body is not a request of its kind; answered with 400."""


@dataclass(slots=True)
class InferenceRequest:
    """The properties of one request that the scheduler uses."""

    model: str | None
    """None when the body names none: any backend may serve it."""
    prompt: bytes
    """Input of the prefix hash: JSON of text or messages as it came, or four bytes per token id."""
    single_engine_reason: str | None = None
    """Why one engine must serve the request alone, in one word; None when it may be split."""
    needs_sidecar: bool = False
    """Whether the body holds a field that clients may not set and only a sidecar removes."""
    _chains: dict[int, list[int]] = field(default_factory=dict, repr=False)
    """Block size in tokens → prefix chain."""

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt: exact for token ids, bytes / BYTES_PER_TOKEN for text."""
        return -(-len(self.prompt) // BYTES_PER_TOKEN)

    def chain(self, block_tokens: int) -> list[int]:
        """The prefix chain in blocks of `block_tokens`; computed once per block size."""
        if (chain := self._chains.get(block_tokens)) is None:
            # KV of two models never matches: the model is the chain's salt.
            salt = (self.model or "").encode()
            chain = text_chain(self.prompt, block_tokens * BYTES_PER_TOKEN, salt)
            self._chains[block_tokens] = chain
        return chain


def parse_request(kind: RequestKind, body: bytes) -> InferenceRequest:
    """The request in `body`. Raises BadBody."""
    try:
        # The members are views into `body`: only those that matter are decoded below.
        members = _with_sampling_params(kind, _decode_members(body))
        return InferenceRequest(
            model=_model(members),
            prompt=_PROMPTS[kind](members),
            single_engine_reason=single_engine_reason(kind, body, members),
            needs_sidecar=not _SIDECAR_FIELDS.isdisjoint(members),
        )
    except _UNREADABLE as err:
        raise _bad_body(body, err) from err


def read_model(body: bytes) -> str | None:
    """The model that a body of no known kind names; None when it names none or is not JSON.

    Raises BadBody for JSON that is nested too deeply to be read.
    """
    try:
        return _any_body.decode(body).model
    except RecursionError as err:
        raise _bad_body(body, err) from err
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def kind_of(request: HttpRequest) -> RequestKind | None:
    """The kind of request in the body; None for a request whose body is not read."""
    return kind_of_path(request.path) if is_json(request) else None


def is_json(request: HttpRequest) -> bool:
    """Whether `request` is a POST of JSON; a POST without a content type counts as one."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0]
    return request.method == "POST" and media_type.strip().lower().endswith(("/json", "+json"))


class _AnyBody(msgspec.Struct):
    model: str | None = None


_decode_members: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_any_body: Final = msgspec.json.Decoder(_AnyBody)
_name: Final = msgspec.json.Decoder(str | None)
_token_ids: Final = msgspec.json.Decoder(list[int])
_list: Final = msgspec.json.Decoder(list[Raw])
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions that decoding JSON raises."""

_SIDECAR_FIELDS: Final = CLIENT_FORBIDDEN | {"vllm_xargs", "extra_args"}
"""The sidecar removes the first, and kv_transfer_params from inside the last two, which vLLM copies
into the same place."""
_NONE: Final = Raw()
_SEARCHED_BYTES: Final = 64 * 1024
"""Of a body that is nested too deeply, the beginning in which the place is searched. The search
decodes it about 17 times, 6 ms in all; a whole body of 16 MiB would block the event loop for more
than a second."""


def _with_sampling_params(kind: RequestKind, members: Members) -> Members:
    """The members, with those of a generate request's sampling parameters beside the others."""
    if kind is not RequestKind.GENERATE or SAMPLING_PARAMS not in members:
        return members
    try:
        return {**members, **_decode_members(members[SAMPLING_PARAMS])}
    except msgspec.ValidationError:
        # Not an object: the engine refuses it.
        return members


def _model(members: Members) -> str | None:
    return _decode_field(members, "model", _name) if "model" in members else None


def _completion_prompt(members: Members) -> bytes:
    raw = bytes(members.get("prompt", _NONE))
    if not raw.startswith(b"["):
        # Without the quotes: the closing one would end the prefix that a longer prompt shares.
        return raw[1:-1]
    if raw[1:].lstrip()[:1] not in (b'"', b"["):
        return _token_bytes(members, "prompt")
    # Several prompts: hashed one behind the other. `single_engine_reason` keeps them together.
    prompts = (bytes(prompt) for prompt in _list.decode(raw))
    return b"".join(
        _token_bytes({"prompt": Raw(prompt)}, "prompt") if prompt.startswith(b"[") else prompt[1:-1]
        for prompt in prompts
    )


def _joined(*names: str) -> Callable[[Members], bytes]:
    """The bytes of these members in the order in which chat templates render them. The closing
    bracket of the last is left out: the next turn of the conversation has a comma there."""

    def prompt(members: Members) -> bytes:
        *first, last = (bytes(members.get(name, _NONE)) for name in names)
        return b"".join(first) + last.removesuffix(b"]")

    return prompt


def _generate_prompt(members: Members) -> bytes:
    return _token_bytes(members, "token_ids") if "token_ids" in members else b""


_PROMPTS: Final[Mapping[RequestKind, Callable[[Members], bytes]]] = {
    RequestKind.COMPLETIONS: _completion_prompt,
    RequestKind.CHAT: _joined("tools", "messages"),
    RequestKind.RESPONSES: _joined("instructions", "tools", "input"),
    RequestKind.MESSAGES: _joined("system", "tools", "messages"),
    RequestKind.GENERATE: _generate_prompt,
}


def _token_bytes(members: Members, name: str) -> bytes:
    try:
        return token_bytes(_decode_field(members, name, _token_ids))
    except OverflowError as err:
        raise BadBody(f"{name}: token ids are whole numbers from 0 to 4294967295") from err


def _decode_field(members: Members, name: str, decoder: msgspec.json.Decoder[Any]) -> Any:
    try:
        return decoder.decode(members[name])
    except msgspec.ValidationError as err:
        raise BadBody(f"{name}: {err}") from err


def _bad_body(body: bytes, err: Exception) -> BadBody:
    """The message for one of `_UNREADABLE`: what is wrong, and where if that is known."""
    if isinstance(err, RecursionError):
        return BadBody(f"the body is nested too deeply{_too_deep_at(body)}")
    if isinstance(err, UnicodeDecodeError):
        return BadBody(f"the body is not UTF-8 (byte {err.start} of a string)")
    if isinstance(err, msgspec.ValidationError):
        return BadBody(f"the body is not a JSON object: {err}")
    cause = str(err).removeprefix("JSON is malformed: ")
    place = "" if "(byte " in cause else f" (byte {len(body)})"
    return BadBody(f"the body is not JSON: {cause}{place}")


def _too_deep_at(body: bytes) -> str:
    """Where nesting exceeds what the parser takes: ` (byte N)`, in the searched beginning only."""
    low, high = 0, min(len(body), _SEARCHED_BYTES)
    if not _is_too_deep(memoryview(body)[:high]):
        return f" (after byte {high})" if high < len(body) else ""
    # A longer part of the body is never less deeply nested: search for the first part too deep.
    while low < high:
        middle = (low + high) // 2
        if _is_too_deep(memoryview(body)[:middle]):
            high = middle
        else:
            low = middle + 1
    return f" (byte {low - 1})"


def _is_too_deep(part: bytes | memoryview) -> bool:
    try:
        _decode_members(part)
    except RecursionError:
        return True
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return False
    return False
