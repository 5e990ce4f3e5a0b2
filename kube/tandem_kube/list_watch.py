"""A list followed by a watch that resumes: the loop under `reflector` and the operator's cache.

    list ──► watch ──ended, broken, silent──► watch from the last version
      ▲        └──expired, or several errors in a row──┐
      └────────────────────────────────────────────────┘

A watch from a version that the cluster has not reached yet is not refused: it stays silent. That is
so after etcd was restored to an older state, which comes with an outage of the API server. So after
an outage the collection is listed again.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from random import Random
from typing import Final, Generic, NoReturn, TypeVar

from .client import Api
from .errors import ApiError, Expired, Unreachable
from .resources import Object, Resource

P = TypeVar("P")

FIRST_PAUSE: Final = 0.2
"""Seconds before the first retry, at most; doubles with each further one."""
MAX_PAUSE: Final = 10.0
"""Seconds between retries, at most: the API server's return goes unnoticed for as long."""
RELIST_AFTER: Final = 2
"""Errors in a row that count as an outage, and not as one broken connection: the version is dropped
and the collection listed again. The cluster may have been restored to an older state meanwhile."""
WATCH_SECONDS: Final = 300
"""Requested duration of a watch; varied by a fifth, so that watches of many clients spread out."""
QUIET_SECONDS: Final = 90.0
"""Silence after which the connection counts as broken. API servers send a bookmark about every 60
seconds."""

_log: Final = logging.getLogger(__name__)


class ListWatch(ABC, Generic[P]):
    """Keeps one collection, or the part that a selector matches, current in what a subclass has.

    `P` is what the subclass keeps of an object of a list. Only the task of `run` calls its methods.
    """

    def __init__(
        self,
        api: Api,
        resource: Resource,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        quiet: float = QUIET_SECONDS,
    ) -> None:
        """`quiet` is the silence in seconds after which a watch counts as broken."""
        self._api, self._resource, self._namespace = api, resource, namespace
        self._labels, self._fields, self._quiet = labels, fields, quiet
        self._version: str | None = None
        """From which to watch; None: list first."""
        self._newest = 0
        """The newest version seen; stays when `_version` is dropped."""
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

    @abstractmethod
    def _parse(self, body: Object) -> P | None:
        """What to keep of an object of a list until its last page; None leaves it out."""

    @abstractmethod
    def _replace(self, listed: list[P], version: int, *, restored: bool) -> None:
        """Bring the copy to a complete list of `version`. `restored`: the cluster is in an older
        state than before, so versions seen until now mean nothing."""

    @abstractmethod
    def _apply(self, kind: str, body: Object) -> None:
        """Bring the copy up to an event: ADDED, MODIFIED or DELETED."""

    def _reconnected(self) -> None:
        """A watch is open again after errors."""

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
        listed: list[P] = []
        version = ""
        pages = self._api.pages(
            self._resource, self._namespace, labels=self._labels, fields=self._fields
        )
        async for page in pages:
            listed += [value for body in page.items if (value := self._parse(body)) is not None]
            version = page.resource_version
        restored = int(version) < self._newest
        self._version, self._newest = version, int(version)
        self._replace(listed, int(version), restored=restored)
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
        self._newest = int(self._version)
        if kind != "BOOKMARK":
            self._apply(kind, body)

    def _on_connected(self) -> None:
        self.connected = True
        if self.last_error is not None:
            _log.info("%s: watch restored", self._description)
            self._reconnected()
        self.last_error = None

    def _on_error(self, err: ApiError) -> None:
        self.failures += 1
        self._failed_in_a_row += 1
        if isinstance(err, Expired) or self._failed_in_a_row >= RELIST_AFTER:
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
