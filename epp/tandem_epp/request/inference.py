"""Reads from a request's body what a pick depends on: model, prompt, and what rules out a split.

Only the members needed are decoded; messages are hashed as the bytes in which they came. A body
that the engine would refuse for another reason is not refused here: the engine's own message is
better.

Errors: `BadBody`, for the client: what is wrong and where.
"""

from typing import Final

import msgspec
import xxhash
from msgspec import Raw

from tandem_contract.chains import Chain
from tandem_contract.prefix import (
    BYTES_PER_TOKEN,
    FINE_TOKENS,
    block_tokens_at,
    covered_tokens,
    text_chain,
)
from tandem_contract.prompt_length import NO_TEXT, PromptText, certain_text
from tandem_contract.request_kinds import SAMPLING_PARAMS, RequestKind
from tandem_contract.response_ids import PREVIOUS
from tandem_contract.single_engine import single_engine_reason
from tandem_contract.transfer_params import CLIENT_FORBIDDEN

from .body_fields import UNREADABLE, BadBody, Members, decode_members, unreadable_body
from .field_types import check_types, read_count, read_flag, wrong_type
from .prompt_key import PromptForm, PromptKey, prompt_key


class InferenceRequest:
    """The properties of one request that the scheduler uses."""

    __slots__ = (
        "_chain",
        "_fingerprint",
        "exact_tokens",
        "form",
        "is_stream",
        "max_tokens",
        "media_parts",
        "model",
        "needs_sidecar",
        "previous_response",
        "prompt",
        "read_tokens",
        "salt",
        "single_engine_reason",
        "text",
        "token_scale",
    )

    def __init__(  # noqa: PLR0917 - what was read, in its order
        self,
        model: str | None,
        prompt: bytes,
        single_engine_reason: str | None = None,
        needs_sidecar: bool = False,
        is_stream: bool = False,
        max_tokens: int | None = None,
        salt: bytes = b"",
        form: PromptForm = PromptForm.OTHER,
        read_tokens: int | None = None,
        chain: Chain | None = None,
        media_parts: int = 0,
        previous_response: str = "",
        fingerprint: int | None = None,
        text: PromptText = NO_TEXT,
    ) -> None:
        self.model = model
        """None when the body names none: any backend may serve it."""
        self.prompt = prompt
        """Input of the prefix hash: JSON of text or messages, or four bytes per token id."""
        self.single_engine_reason = single_engine_reason
        """Why one engine must serve the request alone, in one word; None when it may be split."""
        self.needs_sidecar = needs_sidecar
        """Whether the body holds a field that clients may not set and only a sidecar removes."""
        self.is_stream = is_stream
        """Whether the answer comes token by token, so that its headers tell of the first one."""
        self.max_tokens = max_tokens
        """Most tokens of the answer; None when the body does not say."""
        self.salt = salt
        """What separates this prompt from others with the same beginning: see `prompt_key`."""
        self.form = form
        self.token_scale = 1.0
        """Tokens per assumed token; stays 1 where the prompt is exact."""
        self.exact_tokens: int | None = None
        """Length of the prompt in tokens, where it was tokenized."""
        self.read_tokens = read_tokens
        """`assumed_tokens` where the prompt is not here: another process read it, or only its
        length counts."""
        self._chain, self._fingerprint = chain, fingerprint
        self.media_parts = media_parts
        """Images, sounds and other media of a conversation."""
        self.previous_response = previous_response
        """Id of the stored response that the request continues; empty: none."""
        self.text = text
        """The text that the model has to take; none unless it is very long."""

    @property
    def assumed_tokens(self) -> int:
        """Length of the prompt at BYTES_PER_TOKEN."""
        if self.read_tokens is not None:
            return self.read_tokens
        return -(-len(self.prompt) // BYTES_PER_TOKEN)

    @property
    def text_tokens(self) -> int:
        """`assumed_tokens` of the texts in a prompt; 0 for token ids, and where only a length is
        read."""
        if self.form in _NOT_TEXT:
            return 0
        return max(0, self.assumed_tokens - self.media_parts * FINE_TOKENS)

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

    @property
    def fingerprint(self) -> int:
        """A hash of the whole prompt, by which requests are compared that failed; 0: the prompt is
        not known, so it is like no other."""
        if self._fingerprint is not None:
            return self._fingerprint
        if not self.prompt:
            return 0
        known = covered_tokens(len(self.chain)) * BYTES_PER_TOKEN
        seed = self.chain[-1] if self.chain else xxhash.xxh3_64_intdigest(self.salt)
        return xxhash.xxh3_64_intdigest(self.prompt[known:], seed) or 1


def parse_request(kind: RequestKind, body: bytes) -> InferenceRequest:
    """The request in `body`. Raises BadBody."""
    try:
        # The members are views into `body`: only those that matter are decoded below.
        members = _with_sampling_params(kind, decode_members(body))
        check_types(kind, members)
        model = model_of(members)
        key = prompt_key(kind, model, members)
        return InferenceRequest(
            model=model,
            prompt=key.data,
            single_engine_reason=single_engine_reason(
                kind, body, _without_plain_turns(members, key)
            ),
            needs_sidecar=needs_sidecar(members),
            is_stream=read_flag(members, "stream"),
            max_tokens=_max_tokens(kind, members),
            salt=key.salt,
            form=key.form,
            media_parts=key.media_parts,
            previous_response=_previous_response(kind, members),
            text=certain_text(kind, members, len(body)),
        )
    except UNREADABLE as err:
        raise unreadable_body(body, err) from err


def read_model(body: bytes) -> str | None:
    """The model that a body of no known kind names; None when it names none or is not JSON.

    Raises BadBody for JSON that is nested too deeply to be read, and for a model that is no text.
    """
    try:
        model = _any_body.decode(body).model
        name: str | None = _name.decode(model)
        return name
    except RecursionError as err:
        raise unreadable_body(body, err) from err
    except msgspec.ValidationError as err:
        # No object, such as a list, names no model.
        if body.lstrip()[:1] != b"{":
            return None
        raise wrong_type("model", bytes(model), "the name of a model, in quotes") from err
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def model_of(members: Members) -> str | None:
    """The model among `members`; None: it is not given. Raises BadBody."""
    if (raw := members.get("model")) is None:
        return None
    try:
        model: str | None = _name.decode(raw)
    except msgspec.ValidationError as err:
        raise BadBody(f"model: {err}") from err
    return model


def needs_sidecar(members: Members) -> bool:
    """Whether one of `members` is a field that only a sidecar removes."""
    return not _SIDECAR_FIELDS.isdisjoint(members)


class _AnyBody(msgspec.Struct):
    # Not decoded yet: of a repeated name the last value counts, whatever the others are.
    model: Raw = Raw(b"null")


_any_body: Final = msgspec.json.Decoder(_AnyBody)
_name: Final = msgspec.json.Decoder(str | None)
_SIDECAR_FIELDS: Final = CLIENT_FORBIDDEN | {"vllm_xargs", "extra_args"}
"""The sidecar removes the first, and kv_transfer_params from inside the last two, which vLLM copies
into the same place."""
_NOT_TEXT: Final = (PromptForm.IDS, PromptForm.POOLED)
_TURNS: Final = frozenset({"messages", "input"})
_NONE: Final = Raw()
_ONE_LIMIT: Final = ("max_tokens",)
_LIMITS: Final = {
    RequestKind.CHAT: ("max_completion_tokens", "max_tokens"),
    RequestKind.RESPONSES: ("max_output_tokens",),
}
"""Where a kind has another limit of generated tokens, or two: the first that is given counts."""


def _with_sampling_params(kind: RequestKind, members: Members) -> Members:
    """The members, with those of a generate request's sampling parameters beside the others."""
    if kind is not RequestKind.GENERATE or SAMPLING_PARAMS not in members:
        return members
    try:
        return {**members, **decode_members(members[SAMPLING_PARAMS])}
    except msgspec.ValidationError:
        # Not an object: the engine refuses it.
        return members


def _max_tokens(kind: RequestKind, members: Members) -> int | None:
    names = _LIMITS.get(kind, _ONE_LIMIT)
    limits = [read_count(members, name) for name in names if name in members]
    return next((limit for limit in limits if limit is not None), None)


def _previous_response(kind: RequestKind, members: Members) -> str:
    if kind is not RequestKind.RESPONSES or PREVIOUS not in members:
        return ""
    try:
        return _name.decode(members[PREVIOUS]) or ""
    except msgspec.ValidationError:
        # No text: the engine refuses it.
        return ""


def _without_plain_turns(members: Members, key: PromptKey) -> Members:
    """The members without a conversation of texts only. Its one rule is about media, and looks for
    their fields in the whole body, which takes longer than all else."""
    if key.form is not PromptForm.TEXTS:
        return members
    return {name: raw for name, raw in members.items() if name not in _TURNS}
