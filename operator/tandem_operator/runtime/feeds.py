"""All feeds of the operator, and the sessions of kopf that fill them. No policy.

    kinds that are served ──► feeds ──► Session.run ──ended, restored, other kinds──► again

A session ends by an error that kopf does not take for passing: an error event of a watch, a line
that was cut, a kind that is gone. The next begins with lists, so nothing is missed; until then the
cache keeps what it has.
"""

import asyncio
import logging
import random
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NoReturn

from tandem_kube.client import Api
from tandem_kube.errors import ApiError, NotFound
from tandem_kube.reflector import MAX_PAUSE, QUIET_SECONDS, WATCH_SECONDS

from ..routing.endpoint.observed import OPTIONAL_KINDS
from .cache import ClusterCache
from .kopf_session import FeedFailed, Session
from .watches import Feed, Watch, WatchListener, child_watch, next_pause, watches

DISCOVERY_PERIOD: Final = 15.0
"""Seconds between looks for kinds that the cluster does not serve: one that is installed goes
unnoticed for as long. Each costs one call per missing kind."""
STEADY: Final = 60.0
"""Seconds after which the end of a session is no sign that the next one ends soon, too."""
START: Final = 30.0
"""Seconds in which a session tells of each feed. kopf and the operator look separately for what is
served: of a kind that has just been installed kopf may know nothing."""
SILENCE: Final = 1.2 * WATCH_SECONDS + QUIET_SECONDS
"""Seconds in which each watch ends, or breaks, and is opened again."""

log = logging.getLogger(__name__)


class Feeds:
    """All feeds, kept filled. Those of optional kinds come and go with the kinds."""

    def __init__(
        self,
        api: Api,
        cache: ClusterCache,
        namespaces: Sequence[str | None],
        listener: WatchListener,
    ) -> None:
        """`namespaces` is [None] for all of the cluster."""
        self._api, self._cache = api, cache
        self._namespaces, self._listener = namespaces, listener
        self._feeds: Mapping[str, Feed] = {}
        """By the path of the collection."""
        self._discovered = False

    def is_complete(self, namespace: str) -> bool:
        """Whether the cache has everything in a namespace. Before that, existing objects look
        missing and would be created again."""
        return self._discovered and all(
            feed.has_answer for feed in self._feeds.values() if feed.namespace in (None, namespace)
        )

    async def run(self) -> NoReturn:
        """Feed the cache until cancelled."""
        pause = 0.0
        while True:
            try:
                missing = await self._discover()
            except ApiError as err:
                log.warning("cannot discover which kinds the cluster serves: %s", err)
                await asyncio.sleep(MAX_PAUSE / 2)
                continue
            started = time.monotonic()
            try:
                await self._session(missing)
            except FeedFailed:
                raise
            except Exception as err:  # noqa: BLE001 - the top of kopf, of which any part may fail
                # Whatever it is: kopf's state is the cluster's, and a new session reads it.
                log.warning("kopf ended and is started again: %s: %s", type(err).__name__, err)
            pause = next_pause(0.0 if time.monotonic() - started > STEADY else pause)
            await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _session(self, missing: Collection[Watch]) -> None:
        """Run kopf until the cluster was restored or further kinds are served. Raises what ended
        it otherwise."""
        for feed in self._feeds.values():
            feed.begin()
        tasks = [
            asyncio.create_task(Session(self._api, self._feeds).run(), name="kopf"),
            asyncio.create_task(self._until_served(missing)),
            asyncio.create_task(self._until_unheard(missing)),
            *(asyncio.create_task(feed.restored.wait()) for feed in self._feeds.values()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
        if not tasks[0].cancelled():
            tasks[0].result()

    async def _until_unheard(self, missing: Collection[Watch]) -> None:
        """Return when kopf tells nothing of a kind that is served."""
        clock = asyncio.get_running_loop().time
        begun = clock()
        while True:
            await asyncio.sleep(START)
            for feed in self._feeds.values():
                known = feed.heard_at >= begun
                if feed.watch not in missing and (not known or feed.heard_at < clock() - SILENCE):
                    log.warning("%s: kopf does not watch it, and is started again", feed.path)
                    return

    async def _discover(self) -> Collection[Watch]:
        """Bring the feeds to the kinds that the cluster serves; the watches of those that it does
        not. Raises ApiError."""
        wanted = (*watches(self._cache), *map(child_watch, OPTIONAL_KINDS))
        served = await served_watches(self._api, wanted)
        kinds = frozenset(kind for kind in OPTIONAL_KINDS if child_watch(kind) in served)
        for version, kind in self._cache.kinds - kinds:
            log.warning("the cluster no longer serves %s of %s", kind, version)
        feeds = [
            Feed(watch, namespace, self._cache, self._listener)
            for watch in wanted
            # Nothing waits for an optional kind of endpoints' objects that is not served.
            if watch in served or watch not in map(child_watch, OPTIONAL_KINDS)
            for namespace in (self._namespaces if watch.namespaced else (None,))
        ]
        known, changed = self._feeds, kinds != self._cache.kinds or not self._discovered
        self._feeds = {feed.path: known.get(feed.path, feed) for feed in feeds}
        for path in known.keys() - self._feeds.keys():
            known[path].emptied()
        self._cache.kinds, self._discovered = kinds, True
        if changed:
            self._listener.enqueue_namespace(None)
        return [watch for watch in wanted if watch not in served]

    async def _until_served(self, missing: Collection[Watch]) -> None:
        """Return when the cluster serves one of `missing`."""
        while True:
            await asyncio.sleep(DISCOVERY_PERIOD)
            try:
                if await served_watches(self._api, missing):
                    return
            except ApiError as err:
                log.warning("cannot discover which kinds the cluster serves: %s", err)


async def served_watches(api: Api, wanted: Collection[Watch]) -> Collection[Watch]:
    """Those of `wanted` whose kinds the cluster serves. Raises ApiError."""
    plurals: dict[str, set[str]] = {}
    for version in {watch.resource.api_version for watch in wanted}:
        try:
            listed = await api.raw(f"/apis/{version}" if "/" in version else f"/api/{version}")
        except NotFound:
            listed = {}
        plurals[version] = {each["name"] for each in listed.get("resources") or ()}
    return [w for w in wanted if w.resource.plural in plurals[w.resource.api_version]]
