"""Pages for those whom the cluster allows to read them, as its own components decide it.

    app.middlewares.append(authorize(api))

The caller sends the token of a service account; the API server says whose it is (TokenReview) and
whether that user may `get` the page's path (SubjectAccessReview for a non-resource URL). This needs
the right to create both reviews, for example by the ClusterRole `system:auth-delegator`.

    no token, or one that the API server does not know      401
    a user without the right                                403
    the API server does not answer                          500
"""

import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol

from aiohttp import web

from .errors import ApiError
from .resources import Object, Resource

TOKEN_REVIEWS: Final = Resource("authentication.k8s.io/v1", "tokenreviews")
ACCESS_REVIEWS: Final = Resource("authorization.k8s.io/v1", "subjectaccessreviews")

ALLOWED_SECONDS: Final = 60.0
"""How long a right is trusted: a token that was revoked works for as long."""
DENIED_SECONDS: Final = 10.0
"""How long a refusal is: a right that was granted is noticed after it."""
_CACHED: Final = 256
"""Answers that are kept; callers choose tokens and paths."""

_log: Final = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Reviews(Protocol):
    """The call of the API that reviews need."""

    async def create(self, resource: Resource, body: Object) -> Object:
        """Create a review; returns it with the server's answer. Raises ApiError."""


class Authorizer:
    """Asks the API server, and remembers its answers for a while."""

    def __init__(self, api: Reviews, clock: Callable[[], float] = time.monotonic) -> None:
        self._api, self._clock = api, clock
        self._answers: dict[tuple[bytes, str], tuple[int, float]] = {}
        """(hash of the token, path) → HTTP status, and until when it holds."""

    async def status(self, token: str, path: str) -> int:
        """200, 401 or 403 for who has `token` and asks for `path`. Raises ApiError."""
        key, now = (hashlib.sha256(token.encode()).digest(), path), self._clock()
        status, until = self._answers.get(key, (0, 0.0))
        if now < until:
            return status
        status = await self._ask(token, path)
        if len(self._answers) >= _CACHED:
            del self._answers[next(iter(self._answers))]
        self._answers[key] = status, now + (ALLOWED_SECONDS if status == 200 else DENIED_SECONDS)
        return status

    async def _ask(self, token: str, path: str) -> int:
        review = await self._api.create(TOKEN_REVIEWS, _review("TokenReview", token=token))
        if not review["status"].get("authenticated"):
            return 401
        user = review["status"]["user"]
        spec = {
            "user": user.get("username", ""),
            "uid": user.get("uid", ""),
            "groups": user.get("groups") or [],
            "extra": user.get("extra") or {},
            "nonResourceAttributes": {"path": path, "verb": "get"},
        }
        access = await self._api.create(ACCESS_REVIEWS, _review("SubjectAccessReview", **spec))
        return 200 if access["status"].get("allowed") else 403


def authorize(api: Reviews) -> Any:
    """A middleware that answers only those whom the cluster allows to read the page."""
    authorizer = Authorizer(api)

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not token:
            raise web.HTTPUnauthorized(text="Unauthorized: send the token of a service account\n")
        try:
            status = await authorizer.status(token.strip(), request.path)
        except ApiError as err:
            _log.error("%s: the API server did not say who may read it: %s", request.path, err)
            raise web.HTTPInternalServerError(text="Authorization failed: see the log\n") from err
        if status == 401:
            raise web.HTTPUnauthorized(text="Unauthorized: the token is not valid\n")
        if status == 403:
            raise web.HTTPForbidden(text=f"Forbidden: no right to get {request.path}\n")
        return await handler(request)

    return check


def _review(kind: str, **spec: Any) -> dict[str, Any]:
    resource = TOKEN_REVIEWS if kind == "TokenReview" else ACCESS_REVIEWS
    return {"apiVersion": resource.api_version, "kind": kind, "metadata": {}, "spec": spec}
