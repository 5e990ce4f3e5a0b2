"""The HTTP paths that clients may request of engines: the inference API, and nothing else.

vLLM serves more on the same port: it loads adapters, puts the engine to sleep, resets its caches,
aborts requests and tells its metrics. A client must not reach these. Tandem's Envoy, the EPP and
the sidecar each refuse every other path with 404: a gateway that is not Tandem's has no such list,
and a sidecar may be reached without an EPP. An operator adds paths with `spec.routing.apiPaths`,
`disaggregated_serving.api_paths` of the EPP and the sidecar's `--api-path`.

Paths are compared as they came, without their query: a path that is written in another way
(`//v1/models`, `/v1/%6dodels`, `/v1/x/../models`) is another path, and refused, so that no engine
can read it differently.

Errors: `ValueError` for an added path that is not written as `ApiPaths` says.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from . import endpoints
from .request_kinds import PATHS, POOLED_PATHS, RequestKind

TRANSCRIPTIONS: Final = "/v1/audio/transcriptions"
"""Its body is a form with a field `model`."""
TRANSLATIONS: Final = "/v1/audio/translations"
"""The same."""

API: Final[Mapping[str, str]] = {
    PATHS[RequestKind.CHAT]: "OpenAI's chat completions",
    PATHS[RequestKind.COMPLETIONS]: "OpenAI's completions",
    PATHS[RequestKind.RESPONSES]: "OpenAI's responses",
    PATHS[RequestKind.MESSAGES]: "Anthropic's messages",
    PATHS[RequestKind.GENERATE]: "vLLM's generation from token ids",
    "/v1/responses/*": "a stored response",
    "/v1/responses/*/cancel": "ends a response in the background",
    "/v1/messages/count_tokens": "length of a prompt",
    "/v1/chat/completions/batch": "several chats in one request",
    "/v1/chat/completions/render": "the token ids of a chat",
    "/v1/completions/render": "the token ids of a prompt",
    "/v1/messages/render": "the token ids of a conversation",
    "/v1/chat/completions/derender": "the chat's answer of token ids",
    "/v1/completions/derender": "the text of token ids",
    "/generative_scoring": "probabilities of the next token",
    **{path: pooled.use for path, pooled in POOLED_PATHS.items()},
    TRANSCRIPTIONS: "OpenAI's transcriptions of audio",
    TRANSLATIONS: "OpenAI's translations of audio",
    "/v1/realtime": "OpenAI's realtime API, a websocket",
    endpoints.MODELS: "the models",
    endpoints.HEALTH: "200 while an engine serves",
}
"""Every path that clients may request, and what it is for. `*` stands for one segment."""

FORMS: Final = frozenset({TRANSCRIPTIONS, TRANSLATIONS})
"""The paths whose body is a form."""
SCRAPED: Final = frozenset({endpoints.METRICS})
"""What a sidecar serves beside them to requests that come from no proxy: an EPP scrapes it on the
port of clients."""

NOT_SERVED: Final = (
    "this path is not served: only the paths of the inference API are, such as"
    " /v1/chat/completions and /v1/models. An operator can add one to the API's paths"
)
"""The message of a 404, the same of Envoy, EPP and sidecar."""

_SEGMENT: Final = "[A-Za-z0-9_~-][A-Za-z0-9_.:~-]*"
"""What `*` stands for. Nothing that is empty, a dot segment or escaped: an engine could read it as
another path."""
_ALLOWED: Final = re.compile(r"(?:/|(?:/(?:\*|[A-Za-z0-9_~-][A-Za-z0-9_.:~-]*))*(?:/\*\*)?)")


class ApiPaths:
    """The paths of `API`, and those that an operator added.

    An added path may have `*` for a segment, and end with `/**` for everything below.
    """

    def __init__(self, added: Iterable[str] = ()) -> None:
        """Raises ValueError for a path that is not written like those of `API`."""
        self.added = tuple(dict.fromkeys(path for path in added if path not in API))
        for path in self.added:
            if not path or _ALLOWED.fullmatch(path) is None:
                raise ValueError(
                    f"{path!r} is no path of an API: write /a/path without a query or escapes;"
                    f" * stands for one segment, and /** at the end for everything below"
                )
        paths = (*API, *self.added)
        self.exact: tuple[str, ...] = tuple(path for path in paths if "*" not in path)
        """Paths without `*`, the most frequent first."""
        self.patterns: tuple[str, ...] = tuple(_pattern(path) for path in paths if "*" in path)
        """The others as regular expressions, in the syntax that RE2 and Python share."""
        self._exact = frozenset(self.exact)
        self._matches = re.compile("|".join(self.patterns)).fullmatch

    def __contains__(self, target: object) -> bool:
        """Whether clients may request `target`: path and perhaps query, as on the request line."""
        path = str(target).partition("?")[0]
        return path in self._exact or self._matches(path) is not None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ApiPaths) and self.added == other.added

    def __hash__(self) -> int:
        return hash(self.added)


def _pattern(path: str) -> str:
    """The regular expression of a path with `*`."""
    head, below = (path[:-3], f"(?:/{_SEGMENT})+") if path.endswith("/**") else (path, "")
    segments = (_SEGMENT if part == "*" else re.escape(part) for part in head.split("/"))
    return "/".join(segments) + below
