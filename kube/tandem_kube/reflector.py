"""A list kept current by a watch that resumes.

    pods = Reflector(api, PODS, "default", labels="app=x", parse=summary, changed=queue.add)
    task = asyncio.create_task(pods.run())
    await pods.synced.wait()
    pods.items[Key("default", "x-0")]

While the API server is unreachable, `items` keeps its last content. Only the value that `parse`
returns is kept of each object.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from .client import Api
from .list_watch import QUIET_SECONDS, ListWatch
from .resources import Object, Resource

T = TypeVar("T")


class Key(NamedTuple):
    """Namespace and name of an object; the namespace is empty for cluster-scoped ones."""

    namespace: str
    name: str


class Reflector(ListWatch[tuple[Key, T]]):
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
        super().__init__(api, resource, namespace, labels=labels, fields=fields, quiet=quiet)
        self._value_of, self._changed = parse, changed
        self._items: dict[Key, T] = {}
        self.items: Mapping[Key, T] = MappingProxyType(self._items)
        """The current values, a live view: do not keep an iterator over it across an await."""

    def _parse(self, body: Object) -> tuple[Key, T] | None:
        value = self._value_of(body)
        return None if value is None else (_key(body), value)

    def _replace(self, listed: list[tuple[Key, T]], version: int, *, restored: bool) -> None:
        fresh = dict(listed)
        changed = [k for k in self._items.keys() | fresh if self._items.get(k) != fresh.get(k)]
        # In place, because `items` is a view of this dict.
        self._items.clear()
        self._items.update(fresh)
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


def _key(body: Object) -> Key:
    metadata = body["metadata"]
    return Key(metadata.get("namespace", ""), metadata["name"])
