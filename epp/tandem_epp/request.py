"""Reads from a request's body what a pick depends on: model, prompt, and what rules out a split.

Only the members needed are decoded; messages are hashed as the bytes in which they came. A body
that the engine would refuse for another reason is not refused here: the engine's own message is
better.

Errors: `BadBody`, for the client: what is wrong and where.
"""

import re
from dataclasses import dataclass
from typing import Final

import msgspec
from msgspec import Raw

from tandem_contract.prefix import BYTES_PER_TOKEN, Chain, block_tokens_at, text_chain
from tandem_contract.request_kinds import SAMPLING_PARAMS, RequestKind, kind_of_path
from tandem_contract.single_engine import single_engine_reason
from tandem_contract.transfer_params import CLIENT_FORBIDDEN

from .body_fields import BadBody, Members, decode_field
from .ext_proc.messages import HttpRequest
from .field_types import check_types, read_count, read_flag, wrong_type
from .prompt_key import PromptForm, PromptKey, prompt_key


@dataclass(slots=True)
class InferenceRequest:
    """The properties of one request that the scheduler uses."""

    model: str | None
    """None when the body names none: any backend may serve it."""
    prompt: bytes
    """Input of the prefix hash: JSON of text or messages, or four bytes per token id."""
    single_engine_reason: str | None = None
    """Why one engine must serve the request alone, in one word; None when it may be split."""
    needs_sidecar: bool = False
    """Whether the body holds a field that clients may not set and only a sidecar removes."""
    is_stream: bool = False
    """Whether the answer comes token by token, so that its headers tell of the first one."""
    max_tokens: int | None = None
    """Most tokens of the answer; None when the body does not say."""
    salt: bytes = b""
    """What separates this prompt from others with the same beginning: see `prompt_key`."""
    form: PromptForm = PromptForm.OTHER
    token_scale: float = 1.0
    """Tokens per assumed token; stays 1 where the prompt is exact."""
    exact_tokens: int | None = None
    """Length of the prompt in tokens, where it was tokenized."""
    read_tokens: int | None = None
    """`assumed_tokens` where another process read the prompt, which then is not here."""
    _chain: Chain | None = None

    @property
    def assumed_tokens(self) -> int:
        """Length of the prompt at BYTES_PER_TOKEN."""
        if self.read_tokens is not None:
            return self.read_tokens
        return -(-len(self.prompt) // BYTES_PER_TOKEN)

    @property
    def text_tokens(self) -> int:
        """`assumed_tokens` of a prompt of text; 0 for token ids, and where media count as well."""
        return 0 if self.form in (PromptForm.IDS, PromptForm.MEDIA) else self.assumed_tokens

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt: exact for token ids and where it was tokenized, else estimated."""
        if self.exact_tokens is not None:
            return self.exact_tokens
        # `tokens(assumed_tokens)`, written out: it is asked for five times in each request.
        assumed = self.read_tokens
        if assumed is None:
            assumed = -(-len(self.prompt) // BYTES_PER_TOKEN)
        return assumed if self.token_scale == 1.0 else int(assumed * self.token_scale)

    def tokens(self, assumed: int) -> int:
        """The tokens that a part of the prompt of `assumed` tokens has."""
        return assumed if self.token_scale == 1.0 else int(assumed * self.token_scale)

    def set_length(self, tokens: int) -> None:
        """The prompt was tokenized and has so many tokens."""
        self.exact_tokens = tokens
        self.token_scale = tokens / max(1, self.assumed_tokens)

    @property
    def last_block_tokens(self) -> int:
        """Tokens of the prefix index's block at the prompt's end: of a repeated prompt, fewer than
        these may seem to be missing in the cache."""
        return self.tokens(block_tokens_at(self.assumed_tokens))

    @property
    def chain(self) -> Chain:
        """The prefix chain; computed once."""
        if self._chain is None:
            self._chain = text_chain(self.prompt, self.salt)
        return self._chain


def parse_request(kind: RequestKind, body: bytes) -> InferenceRequest:
    """The request in `body`. Raises BadBody."""
    try:
        # The members are views into `body`: only those that matter are decoded below.
        members = _with_sampling_params(kind, _decode_members(body))
        check_types(kind, members)
        model = _model(members)
        key = prompt_key(kind, model, members)
        return InferenceRequest(
            model=model,
            prompt=key.data,
            single_engine_reason=single_engine_reason(
                kind, body, _without_plain_turns(members, key)
            ),
            needs_sidecar=not _SIDECAR_FIELDS.isdisjoint(members),
            is_stream=read_flag(members, "stream"),
            max_tokens=_max_tokens(members),
            salt=key.salt,
            form=key.form,
        )
    except _UNREADABLE as err:
        raise _bad_body(body, err) from err


def read_model(body: bytes) -> str | None:
    """The model that a body of no known kind names; None when it names none or is not JSON.

    Raises BadBody for JSON that is nested too deeply to be read, and for a model that is no text.
    """
    try:
        model = _any_body.decode(body).model
        name: str | None = _name.decode(model)
        return name
    except RecursionError as err:
        raise _bad_body(body, err) from err
    except msgspec.ValidationError as err:
        # No object, such as a list, names no model.
        if body.lstrip()[:1] != b"{":
            return None
        raise wrong_type("model", bytes(model), "the name of a model, in quotes") from err
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
    # Not decoded yet: of a repeated name the last value counts, whatever the others are.
    model: Raw = Raw(b"null")


_decode_members: Final = msgspec.json.Decoder(dict[str, Raw]).decode
_any_body: Final = msgspec.json.Decoder(_AnyBody)
_name: Final = msgspec.json.Decoder(str | None)
_UNREADABLE: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The exceptions that decoding JSON raises."""

_SIDECAR_FIELDS: Final = CLIENT_FORBIDDEN | {"vllm_xargs", "extra_args"}
"""The sidecar removes the first, and kv_transfer_params from inside the last two, which vLLM copies
into the same place."""
_TURNS: Final = frozenset({"messages", "input"})
_NONE: Final = Raw()
_LIMITS: Final = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_ESCAPES: Final = re.compile(
    rb"(?:\\\\)+"
    rb"|\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<lone>\\u[dD][89a-fA-F][0-9a-fA-F]{2})"
)
"""Escaped backslashes, surrogate pairs, and halves of pairs."""
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
    return decode_field(members, "model", _name) if "model" in members else None


def _max_tokens(members: Members) -> int | None:
    limits = [read_count(members, name) for name in _LIMITS if name in members]
    return next((limit for limit in limits if limit is not None), None)


def _without_plain_turns(members: Members, key: PromptKey) -> Members:
    """The members without a conversation of texts only. Its one rule is about media, and looks for
    their fields in the whole body, which takes longer than all else."""
    if key.form is not PromptForm.TEXTS:
        return members
    return {name: raw for name, raw in members.items() if name not in _TURNS}


def _bad_body(body: bytes, err: Exception) -> BadBody:
    """The message for one of `_UNREADABLE`: what is wrong, and where if that is known."""
    if isinstance(err, RecursionError):
        return BadBody(f"the body is nested too deeply{_too_deep_at(body)}")
    if isinstance(err, UnicodeDecodeError):
        return BadBody(f"the body is not UTF-8 (byte {err.start} of a string)")
    if isinstance(err, msgspec.ValidationError):
        if body.lstrip()[:1] == b"{":
            return BadBody(f"a field has a wrong value: {err}")
        return BadBody(f"the body is not a JSON object: {err}")
    if (lone := _lone_surrogate(body)) is not None:
        written = lone[0].decode()
        return BadBody(
            f"the body has half of a surrogate pair ({written}, byte {lone.start()}): a character"
            " beyond U+FFFF is written as a pair, or as itself"
        )
    cause = str(err).removeprefix("JSON is malformed: ")
    place = "" if "(byte " in cause else f" (byte {len(body)})"
    return BadBody(f"the body is not JSON: {cause}{place}")


def _lone_surrogate(body: bytes) -> re.Match[bytes] | None:
    """The first escape of half a surrogate pair; the decoder's own message for it misleads."""
    return next((match for match in _ESCAPES.finditer(body) if match["lone"]), None)


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
