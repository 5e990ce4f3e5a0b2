"""A list kept current by a watch that resumes.

    pods = Reflector(api, PODS, "default", labels="app=x", parse=summary, changed=queue.add)
    task = asyncio.create_task(pods.run())
    await pods.synced.wait()
    pods.items[Key("default", "x-0")]

    list ──► watch ──over, dropped, silent──► watch from the last version
      ▲        └──too old, or refused again and again──┐
      └────────────────────────────────────────────────┘

While the API is away, `items` stays what it last was. Of each object only what `parse` makes of it
is kept.
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from random import Random
from types import MappingProxyType
from typing import Final, Generic, NamedTuple, NoReturn, TypeVar

from .client import Api
from .errors import ApiError, Expired, Unreachable
from .resources import Object, Resource

T = TypeVar("T")

FIRST_PAUSE: Final = 0.2
"""Seconds before the first new attempt, at most; doubles with each."""
LONGEST_PAUSE: Final = 10.0
"""Seconds between attempts, at most: so late the API's return is noticed."""
RELIST_AFTER: Final = 3
"""Refusals in a row after which the version itself is doubted: one from before the cluster's data
was restored is refused for ever, and not as expired."""
WATCH_SECONDS: Final = 300
"""How long a watch is asked to last, give or take a fifth, so that those of many spread out."""
QUIET_SECONDS: Final = 90.0
"""Silence after which a connection counts as lost: API servers send a bookmark about every 60."""

_log: Final = logging.getLogger(__name__)


class Key(NamedTuple):
    """What an object is called; the namespace of a cluster-scoped one is empty."""

    namespace: str
    name: str


class Reflector(Generic[T]):
    """One collection, or the part of it that a label selector matches."""

    def __init__(
        self,
        api: Api,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        parse: Callable[[Object], T | None],
        changed: Callable[[Key], None] = lambda _key: None,
        quiet: float = QUIET_SECONDS,
    ) -> None:
        """`parse` says what is kept of an object, None for nothing; it must not raise. `changed` is
        called, on the event loop and after `items` has moved, for each key whose value differs.
        `quiet` is in seconds."""
        self._api, self._resource, self._namespace = api, resource, namespace
        self._labels, self._parse, self._changed, self._quiet = labels, parse, changed, quiet
        self._items: dict[Key, T] = {}
        self._version: str | None = None
        self._failed_in_a_row = 0
        self._random = Random()
        self.items: Mapping[Key, T] = MappingProxyType(self._items)
        """What is known, live; do not keep an iterator over it across an await."""
        self.synced = asyncio.Event()
        """Set once the collection has been listed; never cleared."""
        self.connected = False
        """Whether a watch is open now: `items` is current."""
        self.failures = 0
        """Attempts that failed, all told."""
        self.trouble: ApiError | None = None
        """Why `items` may be old; None while a watch is open."""

    async def run(self) -> NoReturn:
        """Keep `items` current until cancelled; every failure of the API is retried."""
        while True:
            try:
                version = self._version if self._version is not None else await self._list()
                await self._watch(version)
            except ApiError as err:
                self._failed(err)
            finally:
                self.connected = False
            await asyncio.sleep(self._pause())

    async def _list(self) -> str:
        fresh: dict[Key, T] = {}
        version = ""
        async for page in self._api.pages(self._resource, self._namespace, labels=self._labels):
            parsed = ((_key(body), self._parse(body)) for body in page.items)
            fresh.update((key, value) for key, value in parsed if value is not None)
            version = page.resource_version
        moved = [k for k in self._items.keys() | fresh if self._items.get(k) != fresh.get(k)]
        self._items.clear()
        self._items.update(fresh)
        self._version = version
        for key in moved:
            self._changed(key)
        self.synced.set()
        return version

    async def _watch(self, version: str) -> None:
        opened = self._api.watch(
            self._resource,
            self._namespace,
            resource_version=version,
            labels=self._labels,
            seconds=int(WATCH_SECONDS * self._random.uniform(0.8, 1.2)),
            quiet=self._quiet,
        )
        async with opened as events:
            self._well()
            since = asyncio.get_running_loop().time()
            async for event in events:
                self._failed_in_a_row = 0
                self._take(event["type"], event["object"])
            if asyncio.get_running_loop().time() - since < LONGEST_PAUSE:
                raise Unreachable(0, "the watch ended as soon as it had begun")

    def _take(self, kind: str, body: Object) -> None:
        self._version = body["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return
        key = _key(body)
        value = None if kind == "DELETED" else self._parse(body)
        if value == self._items.get(key):
            return
        if value is None:
            del self._items[key]
        else:
            self._items[key] = value
        self._changed(key)

    def _well(self) -> None:
        self.connected = True
        if self.trouble is not None:
            _log.info("%s: watched again, %d known", self._what, len(self._items))
        self.trouble = None

    def _failed(self, err: ApiError) -> None:
        self.failures += 1
        self._failed_in_a_row += 1
        answered = err.status != 0
        if isinstance(err, Expired) or (answered and self._failed_in_a_row >= RELIST_AFTER):
            self._version = None
        # Connections break and versions age in good health: the next attempt tells.
        passing = isinstance(err, Expired | Unreachable) and self._failed_in_a_row == 1
        if not passing and (self.trouble is None or str(self.trouble) != str(err)):
            _log.warning(
                "%s: cannot be read, the %d known stay: %s", self._what, len(self._items), err
            )
            self.trouble = err

    def _pause(self) -> float:
        """Seconds to the next attempt: none after a watch that ended in its time."""
        if self._failed_in_a_row == 0:
            return 0.0
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self._failed_in_a_row - 1, 16))
        asked = self.trouble.retry_after if self.trouble else None
        return self._random.uniform(0.5, 1.0) * longest + (asked or 0.0)

    @property
    def _what(self) -> str:
        where = f" in {self._namespace}" if self._namespace else ""
        return f"{self._resource.plural}{where}{f' ({self._labels})' if self._labels else ''}"


def _key(body: Object) -> Key:
    metadata = body["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])
