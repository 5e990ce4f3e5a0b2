"""The requests that generate text, and the HTTP path of each: vLLM's API.

The EPP and the sidecar read the bodies of these; every other request passes through unread.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


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

SAMPLING_PARAMS: Final = "sampling_params"
"""The object in which a generate request keeps the fields that the other kinds have at the top."""


def kind_of_path(path: str) -> RequestKind | None:
    """The kind that `path` (a query string may follow) serves; None: the request passes through."""
    return _KINDS.get(path.partition("?")[0])
