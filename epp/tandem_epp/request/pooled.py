"""Requests without generated tokens (embeddings, classes, scores): their model, and the length of
their prompts. Pure.

An engine computes these prompts and generates nothing, so one engine serves them alone, and no
prefix is remembered of them. Text counts BYTES_PER_TOKEN bytes per token, a media part one block,
token ids exactly. A model that compares texts reads a query once with each document; one that
embeds them reads it once, so its requests count too much.

Errors: `BadBody`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec
from msgspec import Raw

from tandem_contract.chains import Chain
from tandem_contract.prefix import BYTES_PER_TOKEN
from tandem_contract.request_kinds import PooledKind

from .body_fields import UNREADABLE, Members, decode_members, unreadable_body
from .field_types import check_types, wrong_type
from .inference import InferenceRequest, model_of, needs_sidecar
from .media import BLOCK_BYTES, read_conversation
from .prompt_key import PromptForm, prompts_data

POOLING: Final = "pooling"
"""The reason for which one engine serves these requests alone."""
MAX_TOKENS: Final = 1 << 22
"""No engine computes more tokens for one request."""
NO_CHAIN: Final = Chain("Q")
_LOOKED_AT: Final = 64
"""Bytes of a list by which texts and messages are told apart."""


def parse_pooled(kind: PooledKind, body: bytes) -> InferenceRequest:
    """The request in `body`. Raises BadBody."""
    try:
        members = decode_members(body)
        check_types(kind, members)
        size = _BYTES[kind](members)
        return InferenceRequest(
            model=model_of(members),
            prompt=b"",
            single_engine_reason=POOLING,
            needs_sidecar=needs_sidecar(members),
            max_tokens=0,
            form=PromptForm.POOLED,
            read_tokens=min(-(-size // BYTES_PER_TOKEN), MAX_TOKENS),
            chain=NO_CHAIN,
        )
    except UNREADABLE as err:
        raise unreadable_body(body, err) from err


_list: Final = msgspec.json.Decoder(list[Raw]).decode
_PAIRS: Final = (
    ("queries", "documents"),
    ("queries", "items"),
    ("data_1", "data_2"),
    ("text_1", "text_2"),
)
"""The names under which a score request has its two lists."""


def _input_bytes(members: Members) -> int:
    size = 0
    if "input" in members:
        beginning = bytes(memoryview(members["input"])[:_LOOKED_AT])
        if beginning.lstrip(b"[ \t\r\n").startswith(b"{"):
            size += _conversation_bytes("input", members["input"])
        else:
            size += len(prompts_data(members, "input")[0])
    if "messages" in members:
        size += _conversation_bytes("messages", members["messages"])
    return size


def _conversation_bytes(name: str, raw: Raw) -> int:
    """Of a list of messages, or of a list of such lists."""
    if not bytes(raw)[1:].lstrip().startswith(b"["):
        return sum(map(len, read_conversation(raw, name).pieces))
    return sum(
        len(piece)
        for i, turns in enumerate(_list(raw))
        for piece in read_conversation(turns, f"{name}[{i}]").pieces
    )


def _cohere_bytes(members: Members) -> int:
    size = 0
    if _is_list(members, "texts"):
        size += sum(map(len, _texts("texts", members["texts"])))
    if _is_list(members, "images"):
        size += BLOCK_BYTES * len(_list(members["images"]))
    if _is_list(members, "inputs"):
        size += _conversation_bytes("inputs", members["inputs"])
    return size


def _is_list(members: Members, name: str) -> bool:
    return name in members and memoryview(members[name])[0] == ord("[")


def _texts(name: str, raw: Raw) -> Iterator[bytes]:
    for i, item in enumerate(_list(raw)):
        text = bytes(item)
        if not text.startswith(b'"'):
            raise wrong_type(f"{name}[{i}]", text, "a text")
        yield text[1:-1]


def _score_bytes(members: Members) -> int:
    for left, right in _PAIRS:
        if left in members and right in members:
            return _compared_bytes(members, left, right)
    return 0


def _compared_bytes(members: Members, left: str, right: str) -> int:
    """Of two lists, of which each item of the first is read with one of the second, or the only one
    with each."""
    queries, query_count = _sides_bytes(left, members[left])
    documents, count = _sides_bytes(right, members[right])
    return queries * (count if query_count == 1 else 1) + documents


def _sides_bytes(name: str, raw: Raw) -> tuple[int, int]:
    """Size and number of texts, or of objects with a content."""
    first = memoryview(raw)[0]
    items = _list(raw) if first == ord("[") else [raw]
    size, objects = 0, []
    for i, item in enumerate(items):
        match memoryview(item)[0]:
            case 0x22:  # a quote
                size += len(memoryview(item)) - 2
            case 0x7B:  # an opening brace
                objects.append(bytes(item))
            case _:
                raise wrong_type(f"{name}[{i}]", bytes(item), "a text or an object with a content")
    if objects:
        size += _conversation_bytes(name, Raw(b"[" + b",".join(objects) + b"]"))
    return size, len(items)


def _rerank_bytes(members: Members) -> int:
    if "query" not in members or "documents" not in members:
        return 0
    return _compared_bytes(members, "query", "documents")


def _nothing(_members: Members) -> int:
    return 0


_BYTES: Final[Mapping[PooledKind, Callable[[Members], int]]] = {
    PooledKind.INPUT: _input_bytes,
    PooledKind.COHERE: _cohere_bytes,
    PooledKind.SCORE: _score_bytes,
    PooledKind.RERANK: _rerank_bytes,
    PooledKind.TOKENIZE: _nothing,
    PooledKind.DETOKENIZE: _nothing,
}
"""Bytes of all prompts together, four for a token id."""
