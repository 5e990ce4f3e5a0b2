"""Session affinity: the pod that served a client before, by one of two kinds of sessions.

    TokenSession   the response names the pod in a header, and the client sends it back: nothing is
                   kept here, so any replica understands it
    IdSession      the client sends an id of its own, and this EPP remembers which pod it went to

Meaning and defaults are llm-d's (llm-d-router, session-affinity-scorer and -filter). A token is the
Base64 of the pod's name.
"""

import binascii
from base64 import b64decode, b64encode
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from ...backends.pods import Pod
from ...choice.context import ChoiceContext

MAX_SESSIONS: Final = 65_536
"""Sessions that are remembered; beyond it, those that were idle for longest are forgotten. Too low:
sessions move to another pod."""
_MAX_ID: Final = 256
"""Characters of an id that distinguish sessions: clients choose it."""


class Session(Protocol):
    """What one of the kinds of sessions knows of a request."""

    def pod(self, pods: Sequence[Pod], context: ChoiceContext) -> Pod | None:
        """The one of `pods` that served the session before; None: it is new, or that pod is not
        among them."""


@dataclass(frozen=True)
class TokenSession:
    """A session whose token the client keeps."""

    header: str
    """Of requests and responses."""
    is_prefill: bool = False
    """Whether the token names the prefill pod instead of the decode pod."""

    def pod(self, pods: Sequence[Pod], context: ChoiceContext) -> Pod | None:
        name = _decode(context.headers.get(self.header, ""))
        return next((pod for pod in pods if pod.name == name), None)

    def response_header(
        self, decode: Pod, prefill: Pod | None, _served: str | None
    ) -> tuple[str, str] | None:
        """Name and value of the header that tells the client its pod; None: no such pod served."""
        pod = prefill if self.is_prefill else decode
        return (self.header, b64encode(pod.name.encode()).decode()) if pod is not None else None


@dataclass(frozen=True)
class IdSource:
    """Where a request tells its session: a header, or a cookie."""

    header: str = ""
    cookie: str = ""

    def read(self, context: ChoiceContext) -> str:
        """The id; empty if the request has none."""
        if self.header:
            return context.headers.get(self.header, "").strip()
        for pair in context.headers.get("cookie", "").split(";"):
            name, _, value = pair.strip().partition("=")
            if name == self.cookie:
                return value.strip()
        return ""


class IdSession:
    """Sessions that clients name. A session that moves to another pod stays there only if its pod
    was no candidate."""

    def __init__(
        self, sources: Sequence[IdSource], ttl: float, *, is_prefill: bool = False
    ) -> None:
        """The first of `sources` that has an id counts; `ttl`: seconds for which an idle session is
        remembered."""
        self._sources, self._ttl, self._is_prefill = sources, ttl, is_prefill
        self._pods: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Id → name of the pod, and when the session was last used (Unix seconds); the latest
        last."""

    def pod(self, pods: Sequence[Pod], context: ChoiceContext) -> Pod | None:
        name = self._bound(self._id(context), context.now)
        pod = next((pod for pod in pods if pod.name == name), None)
        context.notes[self] = pod is not None
        return pod

    def on_placed(self, context: ChoiceContext, decode: Pod, prefill: Pod | None) -> None:
        """Remember the pod of a new session, and of one whose pod was no candidate."""
        session, pod = self._id(context), prefill if self._is_prefill else decode
        if not session or pod is None:
            return
        bound = self._bound(session, context.now)
        if bound is not None and bound != pod.name and context.notes.get(self, True):
            return
        self._pods[session] = (pod.name, context.now)
        self._pods.move_to_end(session)
        self._forget(context.now)

    def _id(self, context: ChoiceContext) -> str:
        ids = (source.read(context) for source in self._sources)
        return next((session for session in ids if session), "")[:_MAX_ID]

    def _bound(self, session: str, now: float) -> str | None:
        name, used = self._pods.get(session, (None, 0.0))
        return name if now - used <= self._ttl else None

    def _forget(self, now: float) -> None:
        while self._pods:
            session, (_, used) = next(iter(self._pods.items()))
            if now - used <= self._ttl and len(self._pods) <= MAX_SESSIONS:
                return
            del self._pods[session]


@dataclass(frozen=True)
class SessionFilter:
    """Keeps the session's pod alone; all pods for a session that has none among them."""

    session: Session
    is_steady = False

    def keep(self, pods: Sequence[Pod], context: ChoiceContext) -> Sequence[Pod]:
        pod = self.session.pod(pods, context)
        return pods if pod is None or len(pods) == 1 else [pod]


@dataclass(frozen=True)
class SessionScorer:
    """1 for the session's pod, 0 for the others; 0 each for a session that has none among them."""

    session: Session
    is_steady = False

    def score(self, pods: Sequence[Pod], context: ChoiceContext) -> list[float]:
        session_pod = self.session.pod(pods, context)
        return [1.0 if pod is session_pod else 0.0 for pod in pods]


def _decode(token: str) -> str | None:
    """The pod's name in a token; None for one that this EPP did not make: clients can send
    anything."""
    try:
        return b64decode(token, validate=True).decode()
    except (binascii.Error, ValueError):
        return None
