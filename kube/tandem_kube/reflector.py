"""A list kept current by a watch that resumes.

    pods = Reflector(api, PODS, "default", labels="app=x", parse=summary, changed=queue.add)
    task = asyncio.create_task(pods.run())
    await pods.synced.wait()
    pods.items[Key("default", "x-0")]

    list ──► watch ──ended, broken, silent──► watch from the last version
      ▲        └──expired, or several errors in a row──┐
      └────────────────────────────────────────────────┘

While the API server is unreachable, `items` keeps its last content. Only the value that `parse`
returns is kept of each object.

A watch from a version that the cluster has not reached yet is not refused: it stays silent. That is
so after etcd was restored to an older state, which comes with an outage of the API server. So after
an outage the collection is listed again.
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
"""Seconds before the first retry, at most; doubles with each further one."""
MAX_PAUSE: Final = 10.0
"""Seconds between retries, at most: the API server's return goes unnoticed for as long."""
OUTAGE: Final = 2
"""Errors in a row that count as an outage, and not as one broken connection: the collection is
listed again. The cluster may have been restored to an older state meanwhile, and a watch from a
version that it has not reached yet is not refused but silent."""
WATCH_SECONDS: Final = 300
"""Requested duration of a watch; varied by a fifth, so that watches of many clients spread out."""
QUIET_SECONDS: Final = 90.0
"""Silence after which the connection counts as broken. API servers send a bookmark about every 60
seconds."""

_log: Final = logging.getLogger(__name__)


class Key(NamedTuple):
    """Namespace and name of an object; the namespace is empty for cluster-scoped ones."""

    namespace: str
    name: str


class Reflector(Generic[T]):
    """A local copy of one collection, or of the part that a label or field selector matches.

    Only the task of `run` changes `items`, so readers on the same event loop need no lock.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        parse: Callable[[Object], T | None],
        changed: Callable[[Key], None] = lambda _key: None,
        quiet: float = QUIET_SECONDS,
    ) -> None:
        """`parse` returns the value to keep for an object, or None to leave it out; it must not
        raise. `changed` is called for each key whose value differs, on the event loop and after
        `items` was updated. `quiet` is the silence in seconds after which a watch counts as broken.
        """
        self._api, self._resource, self._namespace = api, resource, namespace
        self._labels, self._fields, self._quiet = labels, fields, quiet
        self._value_of, self._changed = parse, changed
        self._items: dict[Key, T] = {}
        self.items: Mapping[Key, T] = MappingProxyType(self._items)
        """The current values, a live view: do not keep an iterator over it across an await."""
        self._version: str | None = None
        """From which to watch; None: list first."""
        self._failed_in_a_row = 0
        self._random = Random()
        self.synced = asyncio.Event()
        """Set after the first complete list; never cleared."""
        self.connected = False
        """Whether a watch is open, so that the copy is current."""
        self.failures = 0
        """Number of failed attempts since the start."""
        self.last_error: ApiError | None = None
        """Why the copy may be out of date; None while a watch is open."""

    async def run(self) -> NoReturn:
        """Keep the copy current until cancelled; retries every API error."""
        while True:
            try:
                version = self._version if self._version is not None else await self._list()
                await self._watch(version)
            except ApiError as err:
                self._on_error(err)
            finally:
                self.connected = False
            # Even a pause of 0 lets other tasks of the event loop run.
            await asyncio.sleep(self._pause())

    async def _list(self) -> str:
        # Replace the copy only after the last page: an interrupted list must not remove anything.
        listed: dict[Key, T] = {}
        version = ""
        pages = self._api.pages(
            self._resource, self._namespace, labels=self._labels, fields=self._fields
        )
        async for page in pages:
            for body in page.items:
                if (value := self._value_of(body)) is not None:
                    listed[_key(body)] = value
            version = page.resource_version
        self._version = version
        self._replace(listed)
        self.synced.set()
        return version

    async def _watch(self, version: str) -> None:
        # The duration varies, or the watches of many clients would end and restart together.
        opened = self._api.watch(
            self._resource,
            self._namespace,
            resource_version=version,
            labels=self._labels,
            fields=self._fields,
            seconds=int(WATCH_SECONDS * self._random.uniform(0.8, 1.2)),
            quiet=self._quiet,
        )
        async with opened as events:
            self._on_connected()
            opened_at = asyncio.get_running_loop().time()
            async for event in events:
                self._failed_in_a_row = 0
                # An event, not the open connection, proves that the watch works: a server that is
                # overloaded may accept a watch and then close it.
                self._on_event(event["type"], event["object"])
            if asyncio.get_running_loop().time() - opened_at < MAX_PAUSE:
                # An error, so that a server that closes every watch at once causes no busy loop.
                raise Unreachable(0, "the watch ended right after it had started")

    def _on_event(self, kind: str, body: Object) -> None:
        # Bookmarks too: they keep the version young enough to resume from on a quiet collection.
        self._version = body["metadata"]["resourceVersion"]
        if kind != "BOOKMARK":
            self._apply(kind, body)

    def _replace(self, listed: dict[Key, T]) -> None:
        changed = [k for k in self._items.keys() | listed if self._items.get(k) != listed.get(k)]
        # In place, because `items` is a view of this dict.
        self._items.clear()
        self._items.update(listed)
        for key in changed:
            self._changed(key)

    def _apply(self, kind: str, body: Object) -> None:
        key = _key(body)
        value = None if kind == "DELETED" else self._value_of(body)
        if value == self._items.get(key):
            return
        if value is None:
            del self._items[key]
        else:
            self._items[key] = value
        self._changed(key)

    def _on_connected(self) -> None:
        self.connected = True
        if self.last_error is not None:
            _log.info("%s: watch restored", self._description)
        self.last_error = None

    def _on_error(self, err: ApiError) -> None:
        self.failures += 1
        self._failed_in_a_row += 1
        if isinstance(err, Expired) or self._failed_in_a_row >= OUTAGE:
            self._version = None
        # Connections break and versions expire in normal operation: do not log a single such error.
        is_routine = isinstance(err, Expired | Unreachable) and self._failed_in_a_row == 1
        if not is_routine and (self.last_error is None or str(self.last_error) != str(err)):
            _log.warning("%s: watch failed, keeping what is known: %s", self._description, err)
            self.last_error = err

    def _pause(self) -> float:
        """Seconds until the next attempt; 0 after a watch that ran its normal time."""
        if self._failed_in_a_row == 0:
            return 0.0
        # The exponent is bounded, because 2.0 ** 1024 overflows.
        limit = min(MAX_PAUSE, FIRST_PAUSE * 2.0 ** min(self._failed_in_a_row - 1, 16))
        retry_after = self.last_error.retry_after if self.last_error else None
        return self._random.uniform(0.5, 1.0) * limit + (retry_after or 0.0)

    @property
    def _description(self) -> str:
        where = f" in {self._namespace}" if self._namespace else ""
        selector = ", ".join(filter(None, (self._labels, self._fields)))
        return f"{self._resource.plural}{where}{f' ({selector})' if selector else ''}"


def _key(body: Object) -> Key:
    metadata = body["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])
