"""The API server, for one set or endpoint at a time: the only reads and writes of the loops.

Every write's answer goes to `known` at once. Errors: a refusal of one object becomes a Failure of
its pool and the rest goes on; what says nothing about the object (`refusals.NOT_ABOUT_THE_OBJECT`)
is raised, and the pass is made again later.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from tandem_contract import labels
from tandem_kube.client import Api
from tandem_kube.errors import AlreadyExists, ApiError, Conflict, NotFound
from tandem_kube.resources import (
    CONTROLLER_REVISIONS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    Object,
    Resource,
    resource_of,
)

from ..observed import Body, EndpointKey, Failure, Observed, PoolKey, SetKey
from ..planning.actions import Adopt, Create, SetPlan
from ..planning.revisions import sample_pod
from ..planning.status import StatusBody, status_events
from ..routing.router import ref_of
from ..routing.router_observed import EndpointPlan, ObservedEndpoint, Ref
from .events import send_event
from .known import Known, WorkKey
from .refusals import NOT_ABOUT_THE_OBJECT, failure_of, lasting_failure_of
from .watched import POOLS

MANAGER: Final = "tandem-operator"
"""Owner of the fields this operator applies."""
_SECRET_BYTES: Final = 32
_NOT_OURS: Final = "it exists already and is not the operator's: rename or delete it"

See = Callable[[Body], set[WorkKey]]


class Cluster:
    """What `known` knows, brought up to date and changed."""

    def __init__(self, api: Api, known: Known) -> None:
        self._api = api
        self.known = known

    def observe(self, key: SetKey) -> Observed:
        """The set as known now; no call is made."""
        return self.known.observe(key)

    async def observe_live(self, key: SetKey) -> Observed:
        """The set with its pods as the API server has them now."""
        names = sorted({pool.name for pool in self.known.pool_keys(key)})
        selector = f"{labels.POOL} in ({','.join(names)})"
        before = self.known.observe(key).pods
        listed = await self._api.list(PODS, key.namespace, labels=selector)
        for body in listed.items:
            self.known.see_pod(body)
        live = {body["metadata"]["uid"] for body in listed.items}
        # What a watch brought meanwhile may be younger than the list.
        for pod in before:
            if pod.uid not in live:
                self.known.lose(pod.uid)
        return self.known.observe(key)

    def observe_endpoint(self, key: EndpointKey) -> ObservedEndpoint:
        """The endpoint as known now, with a fresh secret."""
        return self.known.observe_endpoint(key, os.urandom(_SECRET_BYTES))

    async def refused(self, plan: SetPlan) -> dict[PoolKey, Failure]:
        """Pools whose new revision would make pods that the API server does not take, by dry runs:
        a template that can only fail then costs no pod that serves."""
        found: dict[PoolKey, Failure] = {}
        for revision in plan.create_revisions:
            try:
                await self._api.create(PODS, sample_pod(revision.body), dry_run=True)
            except NOT_ABOUT_THE_OBJECT:
                raise
            except ApiError as err:
                if (failure := lasting_failure_of(err)) is not None:
                    found[revision.pool] = failure
        return found

    async def apply(self, plan: SetPlan) -> bool:
        """Do what `plan` says, in its order. False when something was refused, which is then in
        `known.failures`; a pool whose writes all went through has none left there."""
        failures: dict[PoolKey, Failure] = {}
        for pool, write in self._writes(plan, failures):
            try:
                await write
            except NOT_ABOUT_THE_OBJECT:
                raise
            except ApiError as err:
                if type(err) is Conflict:
                    raise
                failures.setdefault(pool, failure_of(err))
        for name in plan.delete_budgets:
            await self._remove(POD_DISRUPTION_BUDGETS, plan.key.namespace, name)
        for name in plan.delete_revisions:
            await self._remove(CONTROLLER_REVISIONS, plan.key.namespace, name)
        for pool in self.known.pool_keys(plan.key):
            self.known.failures.pop(pool, None)
        failures |= {key: pool.refused for key, pool in plan.pools.items() if pool.refused}
        self.known.failures.update(failures)
        return not failures

    def _writes(
        self, plan: SetPlan, failures: Mapping[PoolKey, Failure]
    ) -> Iterator[tuple[PoolKey, Awaitable[None]]]:
        """Each write when the one before is over; no pods for a pool that was refused before."""
        namespace = plan.key.namespace
        for adopt in plan.adopt:
            yield adopt.pool, self._adopt(adopt)
        for revision in plan.create_revisions:
            yield revision.pool, self._create(CONTROLLER_REVISIONS, revision)
        for budget in plan.apply_budgets:
            yield budget.pool, self._apply_budget(budget)
        for label in plan.label_pods:
            yield label.pool, self._patch(PODS, namespace, label.name, label.patch, label.uid)
        for pool in dict.fromkeys(one.pool for one in plan.create_pods):
            if pool not in failures:
                wanted = [one for one in plan.create_pods if one.pool == pool]
                yield pool, self._create_pods(wanted)
        for pod in plan.delete_pods:
            yield pod.pool, self._delete_pod(namespace, pod.name, pod.uid)

    async def report(self, key: PoolKey, status: StatusBody) -> None:
        """Write a pool's status, and send its events, when it differs from what the object has."""
        found = self.known.pools.of(key)
        if not found or found[0].status == status:
            return
        pool, before = found[0], found[0].status
        gone: dict[str, Any] = {name: None for name in before if name not in status}
        patch: Object = {"metadata": {"uid": pool.uid}, "status": {**gone, **status}}
        resource = POOLS[key.kind]
        try:
            body = await self._api.patch(
                resource, key.name, patch, key.namespace, subresource="status"
            )
        except (NotFound, Conflict):
            return  # Deleted; another of its name has its own events.
        self.known.see_pool(body)
        for event in status_events(before, status):
            await send_event(self._api, pool, event.type, event.reason, event.message)

    async def apply_endpoint(self, key: EndpointKey, plan: EndpointPlan) -> bool:
        """Do what `plan` says, in its order. False when something was refused, or was there though
        not known: then another pass is due."""
        failures: dict[Ref, Failure] = {}
        trailed = False
        ours = {ref_of(child) for child in self.known.children.of(key)}
        for body in plan.apply:
            ref, resource = ref_of(body), resource_of(body)
            try:
                if ref not in ours and (found := await self._found(resource, body)):
                    if _anothers(found, key):
                        # An apply would add our fields to it and say nothing.
                        failures[ref] = Failure("NameTaken", _NOT_OURS)
                        continue
                    if labels.ENDPOINT in found["metadata"].get("labels", {}):
                        # The watch trails, and what is there is better than new plan keys.
                        self.known.see_child(found)
                        trailed = True
                        continue
                # Nor does one that comes in this moment lose a field to us.
                made = await self._api.apply(
                    resource, dict(body), manager=MANAGER, force=ref in ours
                )
                self.known.see_child(made)
            except NOT_ABOUT_THE_OBJECT:
                raise
            except ApiError as err:
                failures[ref] = failure_of(err)
        for ref in plan.delete:
            resource = resource_of({"apiVersion": ref.api_version, "kind": ref.kind})
            await self._remove(resource, key.namespace, ref.name)
        self.known.child_failures[key] = failures
        return not failures and not trailed

    async def _found(self, resource: Resource, body: Body) -> Object | None:
        """What has the name of `body` now. Listed, as no right to get these is needed otherwise."""
        metadata = body["metadata"]
        field = f"metadata.name={metadata['name']}"
        listed = await self._api.list(resource, metadata["namespace"], fields=field)
        return listed.items[0] if listed.items else None

    async def _create_pods(self, wanted: Sequence[Create]) -> None:
        """In batches of 1, 2, 4, 8, … that end at the first refusal: a quota that is full is asked
        once, not a hundred times."""
        size, left = 1, list(wanted)
        while left:
            batch, left = left[:size], left[size:]
            made = (self._create(PODS, one) for one in batch)
            ends = await asyncio.gather(*made, return_exceptions=True)
            for end in ends:
                if isinstance(end, BaseException):
                    raise end
            size *= 2

    async def _create(self, resource: Resource, wanted: Create) -> None:
        body = dict(wanted.body)
        try:
            made = await self._api.create(resource, body)
        except AlreadyExists:
            made = await self._api.get(resource, wanted.name, body["metadata"]["namespace"])
            if _belongs(made) != _belongs(body):
                raise
        self._see(resource)(made)

    async def _apply_budget(self, wanted: Create) -> None:
        body = dict(wanted.body)
        made = await self._api.apply(POD_DISRUPTION_BUDGETS, body, manager=MANAGER)
        self.known.see_budget(made)

    async def _adopt(self, adopt: Adopt) -> None:
        """Unless the pool is gone: whoever deletes one with `--cascade=orphan` keeps its pods, and
        garbage collection would take those of an owner that is not there."""
        namespace, name = adopt.pool.namespace, f"metadata.name={adopt.pool.name}"
        listed = await self._api.list(POOLS[adopt.pool.kind], namespace, fields=name)
        there = [p["metadata"] for p in listed.items if "deletionTimestamp" not in p["metadata"]]
        if adopt.owner["uid"] in [metadata["uid"] for metadata in there]:
            kind = PODS if adopt.kind == "Pod" else CONTROLLER_REVISIONS
            await self._patch(kind, namespace, adopt.name, adopt.patch, adopt.uid)

    async def _patch(
        self, resource: Resource, namespace: str, name: str, patch: Body, uid: str
    ) -> None:
        try:
            made = await self._api.patch(resource, name, dict(patch), namespace)
        except (NotFound, Conflict) as err:
            await self._met(resource, namespace, name, uid, err)
            return
        self._see(resource)(made)

    async def _delete_pod(self, namespace: str, name: str, uid: str) -> None:
        try:
            left = await self._api.delete(PODS, name, namespace, uid=uid)
        except (NotFound, Conflict) as err:
            await self._met(PODS, namespace, name, uid, err)
            return
        if left.get("kind") == "Pod" and "deletionTimestamp" in left["metadata"]:
            self.known.see_pod(left)
        else:
            self.known.lose(uid)

    async def _met(
        self, resource: Resource, namespace: str, name: str, uid: str, err: ApiError
    ) -> None:
        """What a write found instead of object `uid`: nothing, or another of its name. Raises `err`
        where it is the very one, which somebody else changed at the same moment."""
        if isinstance(err, Conflict):
            with contextlib.suppress(NotFound):
                found = await self._api.get(resource, name, namespace)
                if found["metadata"]["uid"] == uid:
                    raise err
        self.known.lose(uid)

    async def _remove(self, resource: Resource, namespace: str, name: str) -> None:
        try:
            await self._api.delete(resource, name, namespace)
        except NotFound:
            return

    def _see(self, resource: Resource) -> See:
        return self.known.see_pod if resource == PODS else self.known.see_revision


def _anothers(found: Body, key: EndpointKey) -> bool:
    """Whether an object is neither this operator's nor this endpoint's: the Service of endpoint
    `a-epp` has the name of `a`'s picker."""
    metadata = found["metadata"]
    writers = {one.get("manager") for one in metadata.get("managedFields", ())}
    endpoint = (metadata.get("labels") or {}).get(labels.ENDPOINT, key.name)
    return MANAGER not in writers or endpoint != key.name


def _belongs(body: Body) -> tuple[str | None, list[str]]:
    """Pool and owners. A pod whose pool label somebody took off, to look at it in peace, is none of
    the pool's although it has its name and owner."""
    metadata = body["metadata"]
    owners = sorted(owner["uid"] for owner in metadata.get("ownerReferences", ()))
    return (metadata.get("labels") or {}).get(labels.POOL), owners
