"""kopf, the operator's framework: its settings, its handlers, and one session of it. No policy.

    lists ───► observe ──────────────────────► Feed.listed ──►┐
    watches ─► @kopf.on.event ───────────────► Feed.applied ──┼─► cache ──keys──► work queue
    changes ─► @kopf.on.create, update, resume ► Feed.changed ►┘

A session runs in a thread and an event loop of its own. At its end kopf cancels every task of its
loop that was created after its start; in a main thread it takes SIGTERM and SIGINT for itself.

kopf writes into no object: nothing of it survives in the cluster, and each session begins with
lists.
"""

import asyncio
import concurrent.futures
import contextlib
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, TypeVar

import aiohttp
import kopf
from aiohttp import ClientHandlerType, ClientRequest, ClientResponse

from tandem_contract import labels
from tandem_kube.client import PAGE, Api
from tandem_kube.reflector import QUIET_SECONDS, WATCH_SECONDS
from tandem_kube.resources import Object
from tandem_kube.transport import open_socket

from .watches import Feed, next_pause

R = TypeVar("R")

END_SECONDS: Final = 10.0
"""Seconds in which kopf's tasks end once they are cancelled. Later the process ends, or no further
session would ever begin."""
SILENT_LISTS: Final = 60.0
"""Seconds between lists of collections whose watches told nothing, at least: the API server sends
no bookmarks for kinds that never change, so most of these lists find nothing."""
_BOOKMARK: Final = re.compile(rb'"type": ?"BOOKMARK".*?"resourceVersion": ?"(\d+)"')
_EXPIRED: Final = b'{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired"}}\n'
"""After this event kopf lists the collection, and watches it from there."""
_WRITES_NOTHING: Final = "kopf may not write: the operator writes by itself, while it has the Lease"


class Backoffs:
    """Endless pauses between the attempts of one call, so that no outage and no namespace that is
    forbidden ends the session."""

    def __iter__(self) -> Iterator[float]:
        pause = 0.0
        while True:
            pause = next_pause(pause)
            yield random.uniform(0.5, 1.0) * pause


class NoProgress(kopf.ProgressStorage):
    """Stores no progress of handlers: ours never fail, since the work queue tries again."""

    def fetch(self, **_: Any) -> None:
        return None

    def store(self, **_: Any) -> None: ...
    def purge(self, **_: Any) -> None: ...
    def touch(self, **_: Any) -> None: ...

    def clear(self, *, essence: Any) -> Any:
        return essence


class SpecInMemory(kopf.DiffBaseStorage):
    """The spec of each pool that was handled last, in memory instead of in an annotation.

    A pool with `status.observedGeneration` was handled before the session: it is resumed and not
    created.
    """

    def __init__(self) -> None:
        super().__init__()
        self._specs: dict[str, Any] = {}

    def build(self, *, body: kopf.Body, extra_fields: Any = None) -> Any:
        # Only pools have handlers of changes; copies of all pods would be costly.
        is_pool = body.get("apiVersion") == labels.API_VERSION
        return {"spec": dict(body.get("spec") or {})} if is_pool else {}

    def fetch(self, *, body: kopf.Body) -> Any:
        handled = self._specs.get(body["metadata"]["uid"])
        if handled is None and "observedGeneration" in (body.get("status") or {}):
            return self.build(body=body)
        return handled

    def store(self, *, body: kopf.Body, patch: Any, essence: Any) -> None:
        self._specs[body["metadata"]["uid"]] = essence

    def forget(self, uid: str) -> None:
        """A pool was deleted."""
        self._specs.pop(uid, None)


def settings_for(feeds: Mapping[str, Feed], handled: SpecInMemory) -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    # A Lease with a fence elects the leader; kopf's peers only tell each other who they are.
    settings.peering.standalone = True
    # Kinds that appear and disappear are looked for in `Feeds`, without rights to all CRDs.
    settings.scanning.disabled = True
    # kopf's events have no reasons and actions that a user could filter by.
    settings.posting.enabled = False
    # kopf removes its marker where it has no handler that needs one, also that of another operator.
    settings.persistence.finalizer = f"{labels.GROUP}/none"
    # Else kopf kills the process ten minutes after a session that failed.
    settings.process.ultimate_exiting_timeout = None
    settings.networking.error_backoffs = Backoffs()
    settings.networking.request_timeout, settings.networking.connect_timeout = 60.0, 10.0
    settings.watching.chunk_size = PAGE
    # It varies, or the watches of many clients would end and start again together.
    settings.watching.server_timeout = int(WATCH_SECONDS * random.uniform(0.8, 1.2))
    settings.watching.inactivity_timeout = QUIET_SECONDS
    settings.persistence.progress_storage = NoProgress()
    settings.persistence.diffbase_storage = handled
    # Idle workers of objects cost memory.
    settings.queueing.idle_timeout = 1.0
    for feed in feeds.values():
        resource = feed.watch.resource
        if feed.watch.selector:
            key = (resource.group, resource.version, resource.plural)
            settings.watching.label_selectors[key] = feed.watch.selector
    return settings


class _WatchContent:
    """What kopf reads of a watch. Bookmarks are told, since kopf passes them to no handler."""

    def __init__(self, content: aiohttp.StreamReader, bookmarked: Callable[[int], None]) -> None:
        self._content, self._bookmarked = content, bookmarked
        self.has_expired = False
        """kopf reads that the watch's version has expired, and so lists."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        if self.has_expired:
            yield _EXPIRED
            return
        async for chunk in self._content.iter_chunked(size):
            # A bookmark that two chunks share is missed: the next one comes in a minute.
            for version in _BOOKMARK.findall(chunk):
                self._bookmarked(int(version))
            yield chunk


class FeedFailed(Exception):
    """A bug: the cache could not take what kopf saw, or kopf does not end. A process that starts
    again reads all anew."""


class Session:
    """One session of kopf, which fills `feeds`, by the paths of their collections."""

    def __init__(self, api: Api, feeds: Mapping[str, Feed]) -> None:
        self._api, self._feeds = api, feeds
        self._operator = asyncio.get_running_loop()
        self._failed: asyncio.Future[None] = self._operator.create_future()
        """Gets what a feed raised."""
        self._stop: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._handled = SpecInMemory()
        self._sessions: list[aiohttp.ClientSession] = []
        self._pages: dict[str, list[Object]] = {}
        """What is listed so far of collections of several pages."""
        self._silent_list_at = self._operator.time()
        """When a collection was last listed because its watch told nothing."""

    async def run(self) -> None:
        """Run until cancelled. Raises what ended kopf, and FeedFailed."""
        kopf_ended: concurrent.futures.Future[None] = concurrent.futures.Future()
        # Not of a pool, whose threads a process waits for at its exit.
        threading.Thread(target=self._work, args=(kopf_ended,), name="kopf", daemon=True).start()
        ended = asyncio.wrap_future(kopf_ended)
        try:
            await asyncio.wait([ended, self._failed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # kopf's thread cancels it when it ends at the same moment.
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                self._stop.set_result(None)
            await asyncio.wait([ended], timeout=END_SECONDS)
            if not ended.done():
                raise FeedFailed(f"kopf has not ended after {END_SECONDS:g} s")
        if self._failed.done():
            ended.exception()  # Retrieved, or asyncio would log it as lost.
            self._failed.result()
        ended.result()

    def _work(self, ended: "concurrent.futures.Future[None]") -> None:
        try:
            asyncio.run(self._run())
        except BaseException as err:  # noqa: BLE001 - the top of the thread; `run` raises it
            ended.set_exception(err)
        else:
            ended.set_result(None)

    async def _run(self) -> None:
        """In kopf's own thread."""
        namespaces = {feed.namespace for feed in self._feeds.values() if feed.watch.namespaced}
        roots = await kopf.spawn_tasks(
            registry=self._registry(),
            settings=settings_for(self._feeds, self._handled),
            clusterwide=None in namespaces,
            namespaces=[namespace for namespace in namespaces if namespace is not None],
        )
        stop = asyncio.wrap_future(self._stop)
        done, _ = await asyncio.wait([*roots, stop], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        await self._end()
        for task in done - {stop}:
            task.result()

    async def _end(self) -> None:
        # More than once: kopf's `streaming_block` may swallow a cancellation, and goes on.
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=1.0)
        for session in self._sessions:
            await session.close()

    def _registry(self) -> kopf.OperatorRegistry:
        registry = kopf.OperatorRegistry()
        kopf.on.login(id="login", registry=registry)(self._login)
        by_watch: dict[Any, dict[str | None, Feed]] = {}
        for feed in self._feeds.values():
            by_watch.setdefault(feed.watch, {})[feed.namespace] = feed
        # No kopf.index: a collection that cannot be listed would hold back all handlers. No timers
        # and no daemons: they need finalizers.
        for watch, feeds in by_watch.items():
            resource = watch.resource
            selector = (resource.group, resource.version, resource.plural)
            kopf.on.event(*selector, id="seen", registry=registry)(self._seen(feeds))
            if resource.group == labels.GROUP:
                for change in (kopf.on.create, kopf.on.update, kopf.on.resume):
                    change(*selector, id="changed", registry=registry)(self._changed(feeds))
        return registry

    def _seen(self, feeds: Mapping[str | None, Feed]) -> Callable[..., Any]:
        async def seen(event: kopf.RawEvent, namespace: str | None, **_: Any) -> None:
            # Those without a type come from a list, which `_observe` passes on whole.
            if event["type"] is not None:
                feed = feeds.get(None) or feeds[namespace]
                self._tell(feed.applied, event["type"], event["object"])
            if event["type"] == "DELETED":
                self._handled.forget(event["object"]["metadata"]["uid"])

        return seen

    def _changed(self, feeds: Mapping[str | None, Feed]) -> Callable[..., Any]:
        async def changed(reason: str, body: kopf.Body, namespace: str, **_: Any) -> None:
            feed = feeds.get(None) or feeds[namespace]
            self._tell(feed.changed, reason, dict(body))

        return changed

    async def _login(self, **_: Any) -> kopf.AiohttpSession:
        """A new HTTP session, at the start and after each 401: kopf takes no credentials again that
        were refused. The pause keeps refused attempts apart."""
        await asyncio.sleep(random.uniform(0.5, 1.0) * (1.0 if self._sessions else 0.0))
        configuration = self._api.configuration
        connection = kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
        )
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=0, ssl=connection.as_ssl_context(), socket_factory=open_socket
            ),
            proxy=configuration.proxy,
            trust_env=True,
            middlewares=(self._observe,),
        )
        self._sessions.append(session)
        return kopf.AiohttpSession(server=configuration.host, aiohttp_session=session)

    async def _observe(self, request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
        """Around each call of kopf's: credentials, and what lists and watches say."""
        if request.method != "GET":
            raise PermissionError(_WRITES_NOTHING)
        # On the operator's loop, which the client's token refresh belongs to.
        asked = asyncio.run_coroutine_threadsafe(self._api.authorization(), self._operator)
        credentials = await asyncio.wrap_future(asked)
        request.headers.update(credentials)
        if name := self._api.configuration.tls_server_name:
            request.server_hostname = name
        if (feed := self._feeds.get(request.url.path)) is None:
            return await handler(request)  # Which kinds the cluster serves.
        is_watch = "watch" in request.url.query
        if is_watch:
            pause = await self._ask(feed.pause_before_watch)
            await asyncio.sleep(random.uniform(0.5, 1.0) * pause)
        started, status, failed = time.monotonic(), 0, partial(feed.failed, is_outage=True)
        try:
            response = await handler(request)
            status = response.status
            try:
                await self._tell_answer(feed, request, response)
            except BaseException:
                # kopf will not close what it does not get: the session may end at any moment.
                response.close()
                raise
        except (aiohttp.ClientError, OSError) as err:
            self._tell(failed, f"cannot reach the API server: {err or type(err).__name__}")
            raise
        except asyncio.CancelledError:
            # aiohttp's own time-out reaches a middleware so.
            if not self._stop.done():
                self._tell(failed, "no answer from the API server")
            raise
        finally:
            verb, seconds = "watch" if is_watch else "list", time.monotonic() - started
            self._tell(self._api.observe, verb, status, seconds)
        return response

    async def _tell_answer(
        self, feed: Feed, request: ClientRequest, response: ClientResponse
    ) -> None:
        is_watch, status = "watch" in request.url.query, response.status
        if status >= 400:
            why = f"{status} {(await response.text())[:300]}"
            self._tell(partial(feed.failed, why, is_outage=status >= 500))
        elif is_watch:
            self._tell(feed.watching)
        else:
            self._list(feed, await response.json(), "continue" in request.url.query)
        if is_watch:
            content = _WatchContent(response.content, partial(self._tell, feed.bookmarked))
            response.content = content  # type: ignore[assignment]
            # kopf takes credentials anew by itself, and a kind that is gone ends it.
            if status not in (401, 404) and await self._ask(partial(self._try_doubt, feed)):
                content.has_expired, response.status = True, 200

    def _list(self, feed: Feed, page: Object, is_continued: bool) -> None:
        resource = feed.watch.resource
        names = {"apiVersion": resource.api_version, "kind": feed.watch.kind}
        items = [body | names for body in page.get("items") or ()]
        listed = (self._pages.pop(feed.path, []) if is_continued else []) + items
        if page["metadata"].get("continue"):
            # Kept until the last page: an interrupted list must not remove anything.
            self._pages[feed.path] = listed
        else:
            self._tell(feed.listed, listed, int(page["metadata"]["resourceVersion"]))

    def _try_doubt(self, feed: Feed) -> bool:
        """Whether kopf has to list a collection before it watches it: after an outage, while the
        watch is refused, and in turn with others whose watches told nothing."""
        if not feed.is_failing:
            now = self._operator.time()
            others = self._feeds.values()
            silent = [each for each in others if each.was_silent and not each.is_failing]
            is_next = feed.was_silent and feed is min(silent, key=lambda each: each.listed_at)
            if not is_next or now - self._silent_list_at < SILENT_LISTS:
                return False
            self._silent_list_at = now
        feed.watch_expired()
        return True

    async def _ask(self, call: Callable[[], R]) -> R:
        """What a call on the operator's loop returns, after all that was told before."""
        answer: concurrent.futures.Future[R] = concurrent.futures.Future()

        def give() -> None:
            # The task that asks may have been cancelled.
            if answer.set_running_or_notify_cancel():
                answer.set_result(call())

        self._tell(give)
        return await asyncio.wrap_future(answer)

    def _tell(self, call: Callable[..., None], *arguments: Any) -> None:
        """Call on the operator's loop, in the order of these calls."""
        self._operator.call_soon_threadsafe(self._call, call, *arguments)

    def _call(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as err:  # noqa: BLE001 - ends the process; see FeedFailed
            if not self._failed.done():
                failure = FeedFailed(f"{type(err).__name__}: {err}")
                failure.__cause__ = err
                self._failed.set_exception(failure)
