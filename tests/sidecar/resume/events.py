"""Events of a stream of completions, as vLLM writes them."""

from collections.abc import Mapping, Sequence

import msgspec

DONE = b"data: [DONE]\n\n"


def event(
    text: str,
    ids: Sequence[int] | None,
    prompt: Sequence[int] | None = None,
    *,
    finish: str | None = None,
    stop: str | None = None,
    logprobs: Mapping[str, object] | None = None,
    id: str = "cmpl-first",
    created: int = 5,
) -> bytes:
    """One chunk with `text`; `ids`, `prompt`: token ids, null where they were not asked for."""
    choice = {
        "index": 0,
        "text": text,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": stop,
        "token_ids": ids,
        "prompt_token_ids": prompt,
    }
    return _event(id, created, [choice])


def usage_event(prompt: int, completion: int, *, cached: int | None = None, id: str) -> bytes:
    """The chunk with the usage of the whole answer."""
    usage: dict[str, object] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if cached is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": cached}
    return _event(id, 9, [], usage=usage)


def _event(id: str, created: int, choices: list[object], **more: object) -> bytes:
    head = {"id": id, "object": "text_completion", "created": created, "model": "m"}
    return b"data: " + msgspec.json.encode({**head, "choices": choices, **more}) + b"\n\n"
