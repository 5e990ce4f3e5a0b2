"""Calls to the Kubernetes API in plain JSON.

    async with await connect() as api:
        pods = await api.list(PODS, "default", labels="app=x")
        await api.delete(PODS, "x-0", "default", uid=pods.items[0]["metadata"]["uid"])

kubernetes.aio does authentication, TLS, proxies and token refresh. Its typed models are not loaded:
they cost 105 MB. Every method may raise any ApiError; see `errors`.
"""

import contextlib
import copy
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

import aiohttp
from kubernetes.aio.client.api_client import ApiClient
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config
from yaml import YAMLError

from .errors import Conflict, Invalid, NotConfigured
from .resources import PODS, Object, Resource
from .transport import (
    JSON,
    Observer,
    ProbingClient,
    Transport,
    decode,
    events,
    network,
)

CALL_TIMEOUT: Final = 30.0
"""Seconds for one call, including the connection. An admission webhook may take 10 by default and
30 at most; a longer timeout would block a worker on a server that is gone."""
PAGE: Final = 500
"""Objects per page of a list. A page of engine pods is about 5 MB."""
_TYPE: Final = ("apiVersion", "kind")
_WRONG_UID: Final = "metadata.uid: Invalid value"
_MERGE: Final = "application/merge-patch+json"
_APPLY: Final = "application/apply-patch+yaml"
_NAMESPACE: Final = "/var/run/secrets/kubernetes.io/serviceaccount/namespace"
_TOKEN: Final = "/var/run/secrets/kubernetes.io/serviceaccount/token"  # noqa: S105 - a path


_CONFIG_ERRORS: Final = (
    ConfigException, YAMLError, OSError, ValueError, TypeError, AttributeError, KeyError,
)  # fmt: skip
"""The exceptions that kubernetes.aio raises for a malformed kubeconfig."""


@dataclass(frozen=True)
class Listed:
    """A list or one page of it, and the resource version from which to watch the collection."""

    items: Sequence[Object]
    resource_version: str


async def connect(
    kubeconfig: Path | None = None,
    context: str | None = None,
    *,
    observer: Observer | None = None,
) -> "Api":
    """A client for the cluster that this pod runs in, or for a kubeconfig. Makes no call yet.

    `kubeconfig` and `context` take precedence over the pod's own cluster. Without them, and outside
    a cluster, the first existing file of `$KUBECONFIG` or `~/.kube/config` is read. `observer` is
    called after every API call. Raises NotConfigured, whose message says what to set.
    """
    configuration = Configuration()
    try:
        if kubeconfig or context or not _in_a_pod():
            file = str(_kubeconfig(kubeconfig))
            # persist_config: do not write refreshed tokens back into the user's file.
            loader = await load_kube_config(file, context, configuration, persist_config=False)  # type: ignore[no-untyped-call]  # has no annotations
            namespace = loader.current_context["context"].get("namespace")
        else:
            load_incluster_config(configuration)  # type: ignore[no-untyped-call]  # likewise
            namespace = _own_namespace()
    except _CONFIG_ERRORS as err:
        reason = " ".join(str(err).split())
        raise NotConfigured(f"cannot load the cluster's configuration: {reason}") from err
    client = ApiClient(configuration)
    client.rest_client = ProbingClient(configuration)
    return Api(client, observer, namespace=namespace or "default")


@contextlib.contextmanager
def _wrong_uid_is_a_conflict() -> Iterator[None]:
    """The server reports a wrong `uid` as an attempt to change it."""
    try:
        yield
    except Invalid as err:
        if _WRONG_UID in err.message:
            raise Conflict(409, err.message) from err
        raise


def _in_a_pod() -> bool:
    return Path(_TOKEN).exists()


def _own_namespace() -> str:
    return Path(_NAMESPACE).read_text().strip()


def _kubeconfig(explicit: Path | None) -> Path:
    if explicit is not None:
        if not explicit.is_file():
            raise NotConfigured(f"{explicit}: no such kubeconfig file")
        return explicit
    # kubectl merges all files of KUBECONFIG; here the first one that exists is used alone.
    entries = os.environ.get("KUBECONFIG", "").split(os.pathsep)
    for file in (*(Path(entry) for entry in entries if entry), Path("~/.kube/config").expanduser()):
        if file.is_file():
            return file
    raise NotConfigured(
        "no cluster configured: this process runs in no pod with a service account, and there is no"
        " kubeconfig; give --kubeconfig FILE or set KUBECONFIG"
    )


class Api:
    """A client for one API server, for any number of tasks; use as a context manager or close."""

    def __init__(
        self, client: ApiClient, observer: Observer | None = None, *, namespace: str = "default"
    ) -> None:
        self._transport = Transport(client, observer)
        self.namespace = namespace
        """Namespace of the pod or of the kubeconfig's context: the default of commands."""

    def fenced(self, may_write: Callable[[], bool]) -> "Api":
        """The same client, whose writes raise Fenced once `may_write` returns False.

        Close the original, not this one.
        """
        api = copy.copy(self)
        api._transport = self._transport.fenced(may_write)
        return api

    @property
    def configuration(self) -> Configuration:
        """Host, CA, certificate and token, for code that opens its own connections."""
        configuration: Configuration = self._transport.client.configuration
        return configuration

    async def authorization(self) -> dict[str, str]:
        """The header that authenticates a request, for code that opens its own connections; its
        token is refreshed if necessary. Empty with a client certificate."""
        return await self._transport.authorization()

    def observe(self, verb: str, status: int, seconds: float) -> None:
        """Tell the observer of a call over such a connection."""
        self._transport.observe(verb, status, seconds)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._transport.client.close()  # type: ignore[no-untyped-call]  # has no annotations

    async def get(self, resource: Resource, name: str, namespace: str | None = None) -> Object:
        return await self._call("get", resource.path(namespace, name))

    async def list(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        page: int = PAGE,
    ) -> Listed:
        """All objects that the selectors match, read page by page.

        `namespace` None: of all namespaces. Raises Expired when reading took so long that the
        server no longer has the version of the first page.
        """
        items: list[Object] = []
        version = ""
        async for part in self.pages(resource, namespace, labels=labels, fields=fields, page=page):
            items += part.items
            version = part.resource_version
        return Listed(items, version)

    async def pages(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        page: int = PAGE,
    ) -> AsyncIterator[Listed]:
        """Like `list`, one page at a time, for callers that keep little of each object.

        Yields at least one page.
        """
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(page)}
        while True:
            body = await self._call("list", resource.path(namespace), query=query)
            # A list has apiVersion and kind once; give them to every item, as a single object has.
            kind: Object = {key: body[key].removesuffix("List") for key in _TYPE if key in body}
            meta = body["metadata"]
            items = [{**kind, **item} for item in body.get("items") or ()]
            yield Listed(items, meta["resourceVersion"])
            # A continue token is bound to the version of the first page, so that all pages show one
            # state of the collection. The last page has no token.
            if not (query := {**query, "continue": meta.get("continue", "")})["continue"]:
                return

    async def create(self, resource: Resource, body: Object, *, dry_run: bool = False) -> Object:
        """Create an object; returns it as the server stored it. Raises AlreadyExists."""
        path = resource.path(body["metadata"].get("namespace"))
        query = {"dryRun": "All" if dry_run else ""}
        return await self._call("create", path, body, query=query)

    async def apply(
        self, resource: Resource, body: Object, *, manager: str, force: bool = True
    ) -> Object:
        """Server-side apply: `manager` owns the fields in `body` and no others.

        `force` takes fields over from other managers; without it that is a Conflict. A `uid` is a
        precondition (Conflict).
        """
        meta = body["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"])
        query = {"fieldManager": manager, "force": "true" if force else "false"}
        with _wrong_uid_is_a_conflict():
            return await self._call("apply", path, body, query=query, content=_APPLY)

    async def patch(
        self,
        resource: Resource,
        name: str,
        patch: Object,
        namespace: str | None = None,
        *,
        subresource: str | None = None,
    ) -> Object:
        """JSON merge patch; a `resourceVersion` or `uid` in it is a precondition (Conflict)."""
        path = resource.path(namespace, name, subresource)
        with _wrong_uid_is_a_conflict():
            return await self._call("patch", path, patch, content=_MERGE)

    async def replace(self, resource: Resource, body: Object) -> Object:
        """Replace an object. Raises Conflict unless its resourceVersion is the one in `body`."""
        meta = body["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"])
        return await self._call("update", path, body)

    async def delete(
        self,
        resource: Resource,
        name: str,
        namespace: str | None = None,
        *,
        uid: str | None = None,
        grace: int | None = None,
        propagation: Literal["Background", "Foreground", "Orphan"] = "Background",
    ) -> Object:
        """Start an object's deletion.

        With `uid`, raises Conflict when the name now belongs to another object. Returns the object
        while it terminates, or a `Status` when it is gone already.
        """
        body: Object = {"propagationPolicy": propagation}
        if uid is not None:
            # A replacement reuses the name but never the uid.
            body["preconditions"] = {"uid": uid}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        return await self._call("delete", resource.path(namespace, name), body)

    async def raw(self, path: str) -> Object:
        """GET any path, such as `/apis` or `/version` for discovery."""
        return await self._call("get", path)

    async def proxied(self, pod: str, namespace: str, port: int, path: str) -> bytes:
        """GET `path` from a pod's `port` through the API server's proxy; returns the response body.

        Raises NotFound when the pod or the API server answers 404, and Unreachable when nothing
        listens on the port.
        """
        target = f"{PODS.path(namespace, f'{pod}:{port}', 'proxy')}{path}"
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT)
        async with self._transport.request("get", target, query={}, timeout=timeout) as response:
            with network(target):
                return await response.read()

    @contextlib.asynccontextmanager
    async def watch(
        self,
        resource: Resource,
        namespace: str | None = None,
        *,
        resource_version: str,
        labels: str = "",
        fields: str = "",
        seconds: int = 300,
        quiet: float = 70.0,
    ) -> AsyncIterator[AsyncIterator[Object]]:
        """Watch events since `resource_version`, as `{"type", "object"}`, including bookmarks.

        Ends after about `seconds`; to continue, watch again from the last version. Both entering
        and iterating raise Expired when the version is too old, and Unreachable when the connection
        broke, when the server's host is silent (`open_socket`), or when nothing, not even a
        bookmark, arrived for `quiet` seconds.
        """
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "labelSelector": labels,
            "fieldSelector": fields,
            "timeoutSeconds": str(seconds),
        }
        # No total timeout: the server ends the watch after `seconds`. Only silence is an error, and
        # bookmarks interrupt it on a quiet collection.
        timeout = aiohttp.ClientTimeout(sock_connect=CALL_TIMEOUT, sock_read=quiet)
        path = resource.path(namespace)
        async with self._transport.request("watch", path, query=query, timeout=timeout) as response:
            yield events(response)

    async def _call(
        self,
        verb: str,
        path: str,
        body: Object | None = None,
        *,
        query: Mapping[str, str] | None = None,
        content: str = JSON,
    ) -> Object:
        timeout = aiohttp.ClientTimeout(total=CALL_TIMEOUT)
        async with self._transport.request(
            verb, path, body=body, query=query or {}, content=content, timeout=timeout
        ) as response:
            with network(path):
                # Read inside the request's context, so that the observer's seconds include the
                # body.
                data = await response.read()
        return decode(response.status, data)
