"""Events of completions and chats, as vLLM writes them, and the ledger that reads them."""

from collections.abc import Mapping, Sequence

import msgspec

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.resume.ledger import Ledger
from tandem_sidecar.resume.seam import Seam
from tandem_sidecar.resume.whole_tokens import WholeTokens

DONE = b"data: [DONE]\n\n"


def ledger(kind: RequestKind = RequestKind.COMPLETIONS, *, keeps_ids: bool = False) -> Ledger:
    """The ledger of a stream that begins, of a model of which no token is known."""
    return Ledger(kind, Seam(), WholeTokens(), keeps_ids=keeps_ids)


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


def role_event(prompt: Sequence[int] | None, *, id: str = "cmpl-first", created: int = 5) -> bytes:
    """The chunk that begins a chat; `prompt`: its token ids, null where they were not asked for."""
    delta = {"role": "assistant", "content": ""}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
    return _event(id, created, [choice], prompt_token_ids=prompt)


def chat_event(
    delta: str | Mapping[str, object],
    ids: Sequence[int] | None,
    *,
    finish: str | None = None,
    stop: str | None = None,
    logprobs: Mapping[str, object] | None = None,
    id: str = "cmpl-first",
    created: int = 5,
) -> bytes:
    """A later chunk of a chat, with a text or what a parser made of it."""
    choice = {
        "index": 0,
        "delta": {"content": delta} if isinstance(delta, str) else delta,
        "logprobs": logprobs,
        "finish_reason": finish,
        "stop_reason": stop,
        "token_ids": ids,
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
