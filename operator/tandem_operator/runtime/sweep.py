"""Finding out what was deleted while nobody watched.

A watch that breaks for so long that the API server forgot where it was is begun with a new list,
and what that list lacks kopf does not report. So everything is listed now and then, and always
after such a list.
"""

from collections.abc import Sequence

from tandem_kube.client import Api

from .known import Known, WorkKey
from .watched import Watched


async def sweep(
    api: Api, known: Known, kinds: Sequence[Watched], namespaces: Sequence[str | None]
) -> set[WorkKey]:
    """Bring `known` to what the API server lists; the keys that have something to look at.

    `namespaces` [None] is all. Raises ApiError; nothing is then taken to be deleted.
    """
    before, live, changed = known.uids(), set[str](), set[WorkKey]()
    for kind in kinds:
        for namespace in namespaces if kind.namespaced else (None,):
            listed = await api.list(kind.resource, namespace, labels=kind.selector)
            for body in listed.items:
                live.add(body["metadata"]["uid"])
                changed |= kind.see(known, body)
    # Known before the lists began and in none of them: what came meanwhile is not in `before`.
    for uid in before - live:
        changed |= known.lose(uid)
    return changed
