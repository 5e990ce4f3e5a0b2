"""All API reads and writes of a reconciliation, for one set or endpoint at a time.

The answer to every write but one goes into the cache at once. When the API server refuses one
object, that becomes a Failure of its pool and the other writes continue. Conflicts, and errors that
say nothing about the object (`write_errors.TRANSIENT_ERRORS`), are raised: the whole reconciliation
is retried.
"""

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL
from tandem_kube.client import Api
from tandem_kube.errors import AlreadyExists, ApiError, Conflict, NotFound
from tandem_kube.events import send_event
from tandem_kube.resources import (
    CONTROLLER_REVISIONS,
    DEPLOYMENTS,
    JOBS,
    POD_DISRUPTION_BUDGETS,
    PODS,
    SERVICES,
    Object,
    Resource,
    resource_of,
)

from ..observed import Body, EndpointKey, Failure, Observed, PoolKey, SetKey
from ..planning.actions import Adopt, ApplyReplicas, Create, SetPlan
from ..planning.api_objects import FIELD_MANAGER
from ..planning.key_rotation import SECRET_BYTES
from ..planning.revisions import sample_pod
from ..planning.status import StatusBody, status_events
from ..pods.manifests import plan_key_secret
from ..routing.endpoint.observed import EndpointPlan, ObjectRef, ObservedEndpoint
from ..routing.objects.common import is_taken_over
from .bodies import endpoint_of_plan_keys, is_foreign, pool_and_owners
from .cache import ClusterCache, WorkKey
from .reads import get_by_name, get_secret, read_plan_keys, read_pools
from .watches import POOL_RESOURCES
from .write_errors import (
    TRANSIENT_ERRORS,
    failure_from_error,
    image_volume_failure,
    template_failure,
)

EVENT_CONTROLLER: Final = "tandem.dev/operator"
"""`reportingController` of our events."""
_NOT_OURS: Final = "it exists already and does not belong to the operator: rename or delete it"


class Cluster:
    """The cluster: observed through the cache, changed through the API."""

    def __init__(self, api: Api, cache: ClusterCache) -> None:
        self.api = api
        self.cache = cache

    def observe(self, key: SetKey) -> Observed:
        """The set as the cache has it; makes no call."""
        return self.cache.observe(key)

    async def observe_live(self, key: SetKey) -> Observed:
        """The set with its pods as the API server has them now; updates the cache."""
        names = sorted({pool.name for pool in self.cache.pool_keys(key)})
        # The label has the pool's name alone, so pods of another set may be listed as well.
        selector = f"{labels.POOL} in ({','.join(names)})"
        before = self.cache.observe(key).pods
        listed = await self.api.list(PODS, key.namespace, labels=selector)
        for body in listed.items:
            self.cache.upsert_pod(body)
        live = {body["metadata"]["uid"] for body in listed.items}
        # Remove only pods that were known before the list: a watch may have added younger ones.
        for pod in before:
            if pod.uid not in live:
                self.cache.remove(pod.uid)
        return self.cache.observe(key)

    async def read_pools(self, pools: Iterable[PoolKey]) -> set[WorkKey]:
        """Bring pools up to what the API server has now; the keys that this affects."""
        return await read_pools(self.api, self.cache, pools)

    async def read_decode_pools(self, namespace: str) -> set[WorkKey]:
        """Bring DecodePools of which the cache may not know yet into it; the affected keys."""
        try:
            listed = await self.api.list(POOL_RESOURCES[DECODE_POOL], namespace)
        except NotFound:
            return set()  # The CRD is gone, and with it every pool.
        return {key for body in listed.items for key in self.cache.upsert_pool(body)}

    async def lacking_plan_keys(self, pods: Iterable[Create]) -> set[WorkKey]:
        """The endpoints whose Secret of plan keys `pods` mount although it is not there."""
        mounted = {endpoint for pod in pods if (endpoint := endpoint_of_plan_keys(pod.body))}
        return {
            key
            for key in mounted
            if await get_secret(self.api, key.namespace, plan_key_secret(key.name)) is None
        }

    async def read_plan_keys(self, key: EndpointKey) -> None:
        """Bring an endpoint's Secret into the cache, which no watch keeps current."""
        await read_plan_keys(self.api, self.cache, key)

    def observe_endpoint(self, key: EndpointKey) -> ObservedEndpoint:
        """The endpoint as the cache has it, with random bytes for a new plan key."""
        return self.cache.observe_endpoint(key, os.urandom(SECRET_BYTES))

    async def dry_run_revisions(self, plan: SetPlan) -> dict[PoolKey, Failure]:
        """The pools for whose new revisions the API server refuses pods, found by dry runs.

        Without this, a rollout could delete a serving pod to make room for pods that can never be
        created.
        """
        refused: dict[PoolKey, Failure] = {}
        for revision in plan.create_revisions:
            pod = sample_pod(revision.body)
            try:
                answer = await self.api.create(PODS, pod, dry_run=True)
                failure = image_volume_failure(pod, answer)
            except TRANSIENT_ERRORS:
                raise
            except ApiError as err:
                failure = template_failure(err)
            if failure is not None:
                refused[revision.pool] = failure
        return refused

    async def apply(self, plan: SetPlan) -> bool:
        """Make the writes of `plan` in its order; returns whether all of them succeeded.

        Refused writes end up in `cache.failures`; a pool whose writes all succeeded has none there.
        """
        failures: dict[PoolKey, Failure] = {}
        for pool, write in self._writes(plan, failures):
            try:
                await write
            except TRANSIENT_ERRORS:
                raise
            except ApiError as err:
                # A plain Conflict means that the plan is out of date. Its subclass AlreadyExists
                # means that the name is taken, which planning again would not change.
                if type(err) is Conflict:
                    raise
                # The first failure of a pool is kept: later writes may fail because of it.
                failures.setdefault(pool, failure_from_error(err))
        for name in plan.delete_budgets:
            # The watch removes it from the cache. A second delete until then is harmless.
            await self._delete(POD_DISRUPTION_BUDGETS, plan.key.namespace, name)
        for name in plan.delete_revisions:
            await self._delete(CONTROLLER_REVISIONS, plan.key.namespace, name)
        for job in plan.delete_jobs:
            await self._delete(JOBS, plan.key.namespace, job.name, job.uid)
        # Replaced after the last write only: when an error is raised before, the failures of the
        # last complete apply remain.
        for pool in self.cache.pool_keys(plan.key):
            self.cache.failures.pop(pool, None)
        failures |= {key: pool.refused for key, pool in plan.pools.items() if pool.refused}
        self.cache.failures.update(failures)
        return not failures

    def _writes(
        self, plan: SetPlan, failures: Mapping[PoolKey, Failure]
    ) -> Iterator[tuple[PoolKey, Awaitable[None]]]:
        """The writes in order; the caller awaits each one before it takes the next.

        Lazily, because pods are created only for pools that have no entry in `failures` by then.
        """
        namespace = plan.key.namespace
        for adopt in plan.adopt:
            yield adopt.pool, self._adopt(adopt)
        for job in plan.create_jobs:
            yield job.pool, self._create(JOBS, job)
        for revision in plan.create_revisions:
            # Before its pods, whose template would otherwise be lost if the operator died between
            # them.
            yield revision.pool, self._create(CONTROLLER_REVISIONS, revision)
        for budget in plan.apply_budgets:
            yield budget.pool, self._apply_budget(budget)
        # Before the deletions: the EPP stops choosing a pod before the pod begins to drain.
        for label in plan.label_pods:
            yield label.pool, self._patch(PODS, namespace, label.name, label.patch, label.uid)
        for pool in dict.fromkeys(create.pool for create in plan.create_pods):
            if pool not in failures:
                creates = [create for create in plan.create_pods if create.pool == pool]
                yield pool, self._create_pods(creates)
        for pod in plan.delete_pods:
            yield pod.pool, self._delete_pod(namespace, pod.name, pod.uid)
        for replicas in plan.apply_replicas:
            yield replicas.pool, self._apply_replicas(replicas)

    async def write_status(self, key: PoolKey, status: StatusBody) -> set[WorkKey]:
        """Write a pool's status and send events about its transitions, if the status changed.

        Returns the keys to reconcile because someone else has changed the pool since the cache last
        saw it. The watch does not report that change: the answer to this write is newer.
        """
        pools = self.cache.pools.by_key(key)
        # A pool at rest costs no call to the API server.
        if not pools or pools[0].status == status:
            return set()
        pool, before = pools[0], pools[0].status
        # In a merge patch null removes a field.
        removals: dict[str, Any] = {name: None for name in before if name not in status}
        patch: Object = {"metadata": {"uid": pool.uid}, "status": {**removals, **status}}
        resource = POOL_RESOURCES[key.kind]
        try:
            body = await self.api.patch(
                resource, key.name, patch, key.namespace, subresource="status"
            )
        except (NotFound, Conflict):
            return set()  # The pool was deleted. A new one of its name is a different object.
        changed = self.cache.upsert_pool(body)
        after = self.cache.pools.by_key(key)
        is_edited = not after or after[0].without_status != pool.without_status
        for event in status_events(before, status):
            await send_event(
                self.api,
                pool.body,
                event.type,
                event.reason,
                event.message,
                controller=EVENT_CONTROLLER,
            )
        return changed if is_edited else set()

    async def apply_endpoint(self, key: EndpointKey, plan: EndpointPlan) -> bool:
        """Make the writes of `plan` in its order; returns whether the endpoint is as planned.

        It is not when a write was refused, or when the cache lacked an object that exists: then the
        endpoint must be planned again.
        """
        failures: dict[ObjectRef, Failure] = {}
        cache_was_behind = False
        known = {ObjectRef.of(child): child for child in self.cache.endpoint_objects(key)}
        uids = {ref: child["metadata"]["uid"] for ref, child in known.items()}
        for body in plan.apply:
            ref, resource = ObjectRef.of(body), resource_of(body)
            try:
                if ref not in known and (existing := await get_by_name(self.api, resource, body)):
                    if is_foreign(existing, key):
                        # Server-side apply would silently add our fields to someone else's object.
                        failures[ref] = Failure("NameTaken", _NOT_OURS)
                        continue
                    if labels.ENDPOINT in existing["metadata"].get("labels", {}):
                        # Do not overwrite: new plan keys would invalidate those that pods hold.
                        self.cache.upsert_child(existing)
                        cache_was_behind = True
                        continue
                # Without force, an object that someone creates right now causes a conflict instead
                # of losing fields to us. So does a Service that someone has taken over.
                force = ref in known and not is_taken_over(key.name, known[ref])
                applied = await self.api.apply(
                    resource, dict(body), manager=FIELD_MANAGER, force=force
                )
                self.cache.upsert_child(applied)
            except TRANSIENT_ERRORS:
                raise
            except ApiError as err:
                failures[ref] = failure_from_error(err)
        failures |= await self._write_notes(key, plan.notes, uids)
        for ref in plan.end:
            # In the foreground: the Deployment stays until its pods have ended.
            await self._delete(
                DEPLOYMENTS, key.namespace, ref.name, uids[ref], propagation="Foreground"
            )
        for ref in plan.delete:
            resource = resource_of({"apiVersion": ref.api_version, "kind": ref.kind})
            await self._delete(resource, key.namespace, ref.name, uids[ref])
        self.cache.child_failures[key] = failures
        return not failures and not cache_was_behind

    async def _write_notes(
        self, key: EndpointKey, notes: Mapping[str, str | None], uids: Mapping[ObjectRef, str]
    ) -> dict[ObjectRef, Failure]:
        """Write `EndpointPlan.notes` on those very Services; returns the refused writes."""
        failures = {}
        for name, note in notes.items():
            ref = ObjectRef("v1", "Service", name)
            annotations = {labels.UNUSED_SINCE: note}
            change = {"metadata": {"uid": uids[ref], "annotations": annotations}}
            try:
                patched = await self.api.patch(SERVICES, name, change, key.namespace)
                self.cache.upsert_child(patched)
            except (NotFound, Conflict):
                # It is gone, maybe replaced by another of its name: the watch tells the cache.
                continue
            except TRANSIENT_ERRORS:
                raise
            except ApiError as err:
                failures[ref] = failure_from_error(err)
        return failures

    async def _create_pods(self, creates: Sequence[Create]) -> None:
        """Create pods in batches of 1, 2, 4, 8, … and stop after a batch with a refusal.

        A full quota thus costs one call and not a hundred.
        """
        size, remaining = 1, list(creates)
        while remaining:
            batch, remaining = remaining[:size], remaining[size:]
            calls = (self._create(PODS, create) for create in batch)
            # Every call of the batch ends before the first error is raised: none is left running.
            for result in await asyncio.gather(*calls, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
            size *= 2

    async def _create(self, resource: Resource, create: Create) -> None:
        body = dict(create.body)
        try:
            created = await self.api.create(resource, body)
        except AlreadyExists:
            # Names are deterministic, so this may be our own object from an earlier attempt.
            created = await self.api.get(resource, create.name, body["metadata"]["namespace"])
            if pool_and_owners(created) != pool_and_owners(body):
                raise
        self._upsert(resource, created)

    async def _apply_budget(self, budget: Create) -> None:
        body = dict(budget.body)
        applied = await self.api.apply(POD_DISRUPTION_BUDGETS, body, manager=FIELD_MANAGER)
        self.cache.upsert_budget(applied)

    async def _apply_replicas(self, write: ApplyReplicas) -> None:
        # Without force: a number that someone writes right now wins, by a Conflict.
        resource = POOL_RESOURCES[write.pool.kind]
        await self.api.apply(resource, write.body, manager=FIELD_MANAGER, force=False)
        # The answer is no news to anyone once it is in the cache, and yet it is a generation that
        # was not planned, maybe with someone else's edit. So it comes in by `write_status` or by
        # the watch, which enqueue what it changes.

    async def _adopt(self, adopt: Adopt) -> None:
        """Make the pool the owner of an orphan, unless the pool was deleted meanwhile.

        A pool deleted with `--cascade=orphan` leaves its pods behind on purpose; with an owner that
        no longer exists, garbage collection would delete them.
        """
        namespace, name = adopt.pool.namespace, f"metadata.name={adopt.pool.name}"
        listed = await self.api.list(POOL_RESOURCES[adopt.pool.kind], namespace, fields=name)
        live = [p["metadata"] for p in listed.items if "deletionTimestamp" not in p["metadata"]]
        if adopt.owner["uid"] in [metadata["uid"] for metadata in live]:
            kind = PODS if adopt.kind == "Pod" else CONTROLLER_REVISIONS
            await self._patch(kind, namespace, adopt.name, adopt.patch, adopt.uid)

    async def _patch(
        self, resource: Resource, namespace: str, name: str, patch: Body, uid: str
    ) -> None:
        try:
            patched = await self.api.patch(resource, name, dict(patch), namespace)
        except (NotFound, Conflict) as err:
            await self._remove_if_gone(resource, namespace, name, uid, err)
            return
        self._upsert(resource, patched)

    async def _delete_pod(self, namespace: str, name: str, uid: str) -> None:
        try:
            answer = await self.api.delete(PODS, name, namespace, uid=uid)
        except (NotFound, Conflict) as err:
            await self._remove_if_gone(PODS, namespace, name, uid, err)
            return
        # The answer is the pod while it terminates, or a Status when it is gone already.
        if answer.get("kind") == "Pod" and "deletionTimestamp" in answer["metadata"]:
            self.cache.upsert_pod(answer)
        else:
            self.cache.remove(uid)

    async def _remove_if_gone(
        self, resource: Resource, namespace: str, name: str, uid: str, err: ApiError
    ) -> None:
        """Remove object `uid` from the cache after a write to it failed with `err`.

        Raises `err` when the object still exists: then someone else changed it at the same moment.
        """
        if isinstance(err, Conflict):
            with contextlib.suppress(NotFound):
                current = await self.api.get(resource, name, namespace)
                if current["metadata"]["uid"] == uid:
                    raise err
        self.cache.remove(uid)

    async def _delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        uid: str | None = None,
        *,
        propagation: Literal["Background", "Foreground"] = "Background",
    ) -> None:
        """Delete an object, with `uid` that very object and no other of its name."""
        with contextlib.suppress(NotFound, Conflict):
            await self.api.delete(resource, name, namespace, uid=uid, propagation=propagation)

    def _upsert(self, resource: Resource, body: Body) -> set[WorkKey]:
        if resource == PODS:
            return self.cache.upsert_pod(body)
        if resource == JOBS:
            return self.cache.upsert_pull_job(body)
        return self.cache.upsert_revision(body)
