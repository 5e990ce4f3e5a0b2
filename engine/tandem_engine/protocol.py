"""Request bodies of vLLM's `/v1/completions` and `/v1/chat/completions` as types.

    bytes ──body.decode_json──► dict ──parse_completion, parse_chat──► Call
    Call + prompt ids ──resolve──► SamplingParams, once lengths are known

Pure. Fields that vLLM does not know are ignored, as vLLM does. Fields that would change the answer
and that this engine does not support are refused, unless their value has no effect.

Errors: `body.ApiError`, with the HTTP status and the field that is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypedDict, TypeVar

import msgspec

from tandem_contract.transfer_params import FIELD

from .body import ApiError, convert, prompt_token_ids, refuse_unsupported
from .output import TextOptions
from .types import KvTransfer, SamplingParams

MAX_LOGPROBS: Final = 20
"""vLLM's default `--max-logprobs`."""
MAX_SEQUENCES: Final = 256
"""Most sequences of one request: prompts × n. Each has blocks of its own."""
MAX_STOPS: Final = 64
MAX_SALT: Final = 1024
"""Characters of a cache_salt: KV events repeat it."""
_COMPLETION_MAX_TOKENS: Final = 16
_SEED_LIMIT: Final = 2**63
_HIGHEST_TOP_K: Final = 2**31 - 1
_LOWEST_TEMPERATURE: Final = 0.01
_HIGHEST_TEMPERATURE: Final = 100


@dataclass(frozen=True, slots=True)
class Call:
    """One checked request body. Either `prompts` or `messages` is set."""

    sampling: SamplingParams
    """`resolve` sets its `max_tokens`, once the prompt's length is known."""
    max_tokens: int | None
    text: TextOptions
    model: str | None = None
    prompts: tuple[str | tuple[int, ...], ...] = ()
    messages: tuple[dict[str, Any], ...] | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    add_special_tokens: bool = True
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    kv: KvTransfer = None
    cache_salt: str = ""


class StreamOptions(msgspec.Struct):
    """OpenAI's `stream_options`."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Common(msgspec.Struct):
    """Fields of both endpoints; null means the same as absent."""

    model: str | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None


class CompletionBody(_Common):
    """`/v1/completions`."""

    prompt: Any = None
    logprobs: int | None = None


class ChatBody(_Common):
    """`/v1/chat/completions`."""

    messages: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


def parse_completion(raw: Mapping[str, Any], kv: KvTransfer) -> Call:
    """A `/v1/completions` body. Raises ApiError."""
    body = _convert(raw, CompletionBody)
    sampling = _sampling(body, body.logprobs, "logprobs")
    call = Call(
        **_shared(body, kv),
        sampling=sampling,
        max_tokens=_positive(raw.get("max_tokens", _COMPLETION_MAX_TOKENS), "max_tokens"),
        prompts=_prompts(body.prompt),
        add_special_tokens=body.add_special_tokens is not False,
    )
    return _counted(call, len(call.prompts))


def parse_chat(raw: Mapping[str, Any], kv: KvTransfer) -> Call:
    """A `/v1/chat/completions` body. Raises ApiError."""
    body = _convert(raw, ChatBody)
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    if not body.messages:
        raise ApiError(400, "messages is missing or empty", param="messages")
    sampling = _sampling(body, body.top_logprobs or 0 if body.logprobs else None, "top_logprobs")
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    ids = prompt_token_ids(raw)
    call = Call(
        **_shared(body, kv),
        sampling=sampling,
        max_tokens=_positive(getattr(body, name), name),
        prompts=(ids,) if ids else (),
        messages=None if ids else tuple(body.messages),
        template_kwargs={
            **(body.chat_template_kwargs or {}),
            "add_generation_prompt": body.add_generation_prompt is not False,
        },
        add_special_tokens=body.add_special_tokens is True,
    )
    return _counted(call, 1)


def resolve(call: Call, prompt: tuple[int, ...], max_model_len: int, vocab: int) -> SamplingParams:
    """The sampling parameters of one prompt of `call`.

    Raises ApiError when the prompt is empty, does not fit in `max_model_len` together with the
    tokens asked for, or an id is outside the model's `vocab`.
    """
    if not prompt:
        raise ApiError(400, "the prompt is empty: it needs at least one token", param="prompt")
    check_token_ids(prompt, vocab, "prompt")
    check_token_ids(call.sampling.stop_token_ids, vocab, "stop_token_ids")
    available = max_model_len - len(prompt)
    max_tokens = call.max_tokens if call.max_tokens is not None else available
    if available < 1 or max_tokens > available:
        raise ApiError(
            400,
            f"this model's maximum context length is {max_model_len} tokens: the prompt has"
            f" {len(prompt)} and max_tokens is {call.max_tokens or 'at least 1'}",
            param="max_tokens" if available >= 1 else "prompt",
        )
    if call.sampling.min_tokens > max_tokens:
        raise ApiError(
            400,
            f"min_tokens ({call.sampling.min_tokens}) is above max_tokens ({max_tokens})",
            param="min_tokens",
        )
    return replace(call.sampling, max_tokens=max_tokens)


def check_token_ids(token_ids: Sequence[int], vocab: int, param: str) -> None:
    """Raise ApiError when an id is outside a vocabulary of `vocab` tokens."""
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab):
        wrong = next(i for i in token_ids if not 0 <= i < vocab)
        raise ApiError(
            400, f"{param}: token id {wrong} is outside the vocabulary of {vocab}", param=param
        )


B = TypeVar("B", bound=_Common)


def _convert(raw: Mapping[str, Any], kind: type[B]) -> B:
    refuse_unsupported(raw)
    return convert(raw, kind)


class _Shared(TypedDict):
    model: str | None
    text: TextOptions
    n: int
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    kv: KvTransfer
    cache_salt: str


def _shared(body: _Common, kv: KvTransfer) -> _Shared:
    options = body.stream_options or StreamOptions()
    # As in vLLM: a client that means to have a salt must not share its KV by mistake.
    if body.cache_salt == "" or len(body.cache_salt or "") > MAX_SALT:
        problem = f"cache_salt must have 1 to {MAX_SALT} characters"
        raise ApiError(400, problem, param="cache_salt")
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options needs stream: true", param="stream_options")
    return _Shared(
        model=body.model,
        text=TextOptions(
            stop=_stops(body.stop),
            stop_token_ids=tuple(body.stop_token_ids or ()),
            min_tokens=body.min_tokens or 0,
            include_stop_str_in_output=body.include_stop_str_in_output is True,
            skip_special_tokens=body.skip_special_tokens is not False,
        ),
        n=_within("n", 1 if body.n is None else body.n, 1, MAX_SEQUENCES),
        stream=body.stream is True,
        include_usage=options.include_usage is True,
        continuous_usage=options.continuous_usage_stats is True,
        return_token_ids=body.return_token_ids is True,
        kv=kv,
        cache_salt=body.cache_salt or "",
    )


def _sampling(body: _Common, logprobs: int | None, logprobs_name: str) -> SamplingParams:
    if body.top_p is not None and not 0 < body.top_p <= 1:
        raise ApiError(400, f"top_p is {body.top_p}: it must be above 0, at most 1", param="top_p")
    if logprobs is not None:
        _within(logprobs_name, logprobs, 0, MAX_LOGPROBS)
    if body.seed is not None:
        _within("seed", body.seed, -_SEED_LIMIT, _SEED_LIMIT - 1)
    return SamplingParams(
        min_tokens=_within("min_tokens", body.min_tokens or 0, 0, None),
        temperature=_temperature(body.temperature),
        top_p=1.0 if body.top_p is None else body.top_p,
        # As in vLLM, -1 and 0 turn top_k off.
        top_k=max(0, _within("top_k", body.top_k or 0, -1, _HIGHEST_TOP_K)),
        seed=body.seed,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos is True,
        logprobs=logprobs,
    )


def _temperature(value: float | None) -> float:
    """Raise a value close to 0 to vLLM's minimum: logits divided by it would be infinite."""
    if value is None:
        return 1.0
    if not 0 <= value <= _HIGHEST_TEMPERATURE:
        raise ApiError(
            400, f"temperature is {value}: it must be 0 to {_HIGHEST_TEMPERATURE}",
            param="temperature",
        )  # fmt: skip
    return max(value, _LOWEST_TEMPERATURE) if value else 0.0


def _within(name: str, value: int, low: int, high: int | None) -> int:
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"{low} to {high}"
        raise ApiError(400, f"{name} is {value}: it must be {bounds}", param=name)
    return value


def _positive(value: int | None, name: str) -> int | None:
    return None if value is None else _within(name, value, 1, None)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if "" in stops:
        raise ApiError(400, "stop holds an empty string", param="stop")
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop holds {len(stops)} strings: at most {MAX_STOPS}", param="stop")
    return stops


def _prompts(prompt: Any) -> tuple[str | tuple[int, ...], ...]:
    """Prompts from a string, a list of strings, a list of token ids, or a list of such lists."""
    if isinstance(prompt, str):
        return (prompt,)
    if not isinstance(prompt, list) or not prompt:
        problem = (
            "is missing" if prompt is None else "is empty" if prompt == [] else "has a wrong type"
        )
        raise ApiError(
            400, f"prompt {problem}: give a string, token ids, or a list of either", param="prompt"
        )
    if isinstance(prompt[0], str):
        return tuple(convert(prompt, list[str], "prompt"))
    if isinstance(prompt[0], list):
        return tuple(tuple(ids) for ids in convert(prompt, list[list[int]], "prompt"))
    return (tuple(convert(prompt, list[int], "prompt")),)


def _counted(call: Call, prompts: int) -> Call:
    sequences = prompts * call.n
    if sequences > MAX_SEQUENCES:
        raise ApiError(
            400,
            f"{prompts} prompts × n {call.n} are more than {MAX_SEQUENCES} sequences",
            param="n",
        )
    # Transfer parameters name one request id: its blocks are freed after the first read.
    if call.kv is not None and sequences > 1:
        raise ApiError(
            400,
            f"{FIELD} hand over the KV of one sequence: this request has {sequences}",
            param=FIELD,
        )
    return call
