"""The requests whose bodies are read, and their HTTP paths: vLLM's API.

The EPP and the sidecar read the bodies of `RequestKind`, which generate text. The EPP also reads
those of `PooledKind`, for their model and size. Every other request passes through unread.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple


class RequestKind(StrEnum):
    """One generating API. The value is its label in metrics and logs."""

    COMPLETIONS = "completions"
    CHAT = "chat"
    RESPONSES = "responses"
    MESSAGES = "messages"
    GENERATE = "generate"


PATHS: Final[Mapping[RequestKind, str]] = {
    RequestKind.COMPLETIONS: "/v1/completions",
    RequestKind.CHAT: "/v1/chat/completions",
    RequestKind.RESPONSES: "/v1/responses",
    RequestKind.MESSAGES: "/v1/messages",
    RequestKind.GENERATE: "/inference/v1/generate",
}
_KINDS: Final[Mapping[str, RequestKind]] = {path: kind for kind, path in PATHS.items()}


class PooledKind(StrEnum):
    """Requests without generated tokens, by the fields that hold their prompts. No value is one of
    `RequestKind`."""

    INPUT = "input"
    """`input` or `messages`."""
    COHERE = "cohere"
    """`texts`, `images` or `inputs`."""
    SCORE = "score"
    """Two lists of texts that are compared, under one of several pairs of names."""
    RERANK = "rerank"
    """`query` and `documents`."""
    TOKENIZE = "tokenize"
    """`prompt` or `messages`, from which no engine computes anything."""
    DETOKENIZE = "detokenize"
    """`tokens`; the same."""


BodyKind = RequestKind | PooledKind


class PooledPath(NamedTuple):
    """A path of one of these kinds."""

    kind: PooledKind
    use: str
    """What it is for."""


POOLED_PATHS: Final[Mapping[str, PooledPath]] = {
    "/v1/embeddings": PooledPath(PooledKind.INPUT, "OpenAI's embeddings"),
    "/v2/embed": PooledPath(PooledKind.COHERE, "Cohere's embeddings"),
    "/pooling": PooledPath(PooledKind.INPUT, "vLLM's pooling models"),
    "/classify": PooledPath(PooledKind.INPUT, "the same, classes"),
    "/score": PooledPath(PooledKind.SCORE, "similarity of texts"),
    "/v1/score": PooledPath(PooledKind.SCORE, "the same"),
    "/rerank": PooledPath(PooledKind.RERANK, "order of documents"),
    "/v1/rerank": PooledPath(PooledKind.RERANK, "the same"),
    "/v2/rerank": PooledPath(PooledKind.RERANK, "the same"),
    "/tokenize": PooledPath(PooledKind.TOKENIZE, "token ids of a text"),
    "/detokenize": PooledPath(PooledKind.DETOKENIZE, "text of token ids"),
}

SAMPLING_PARAMS: Final = "sampling_params"
"""The object in which a generate request keeps the fields that the other kinds have at the top."""


def kind_of_path(path: str) -> RequestKind | None:
    """The kind that `path` (a query string may follow) serves; None: the request passes through."""
    return _KINDS.get(path.partition("?")[0])


def api_of_path(path: str) -> RequestKind | None:
    """The kind that `path` (a query string may follow) serves, or is below; None: another API."""
    path = path.partition("?")[0]
    return next((kind for kind, own in PATHS.items() if f"{path}/".startswith(f"{own}/")), None)


def pooled_kind_of_path(path: str) -> PooledKind | None:
    """The kind without generated tokens that `path` serves."""
    pooled = POOLED_PATHS.get(path.partition("?")[0])
    return pooled.kind if pooled is not None else None
