"""The two reconcilers, one screen each: observe → plan (pure) → apply → write status."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from ..observed import EndpointKey, SetKey
from ..planning.key_rotation import pools_with_transfer_keys
from ..planning.plan import plan_set
from ..planning.status import statuses
from ..resources.resolve import Defaults
from ..routing.endpoint.plan import plan_endpoint, router_state
from ..routing.endpoint.settings import RouterSettings
from .cache import WorkKey
from .cluster import Cluster
from .reads import TransferKeySecrets

log = logging.getLogger(__name__)


class WritesRefused(Exception):
    """The API server refused a write, or pods wait for a Secret that is not there yet. The status
    has the API server's message. Retry with backoff."""


@dataclass(frozen=True)
class Reconcilers:
    """Reconcile one key at a time, each key in at most one task.

    Each method returns the seconds after which the key is due again without any event, or None.
    """

    cluster: Cluster
    defaults: Defaults
    router: RouterSettings
    enqueue: Callable[[set[WorkKey]], None]
    transfer_keys: TransferKeySecrets = field(default_factory=TransferKeySecrets)

    async def reconcile(self, key: WorkKey) -> float | None:
        if isinstance(key, SetKey):
            return await self.reconcile_set(key)
        return await self.reconcile_endpoint(key)

    async def reconcile_set(self, key: SetKey) -> float | None:
        """Bring a set's revisions, budgets and pods one step closer to its spec; write its status.

        Raises WritesRefused when the API server refused a write, and ApiError when a call failed
        for another reason.
        """
        cluster = self.cluster
        plan = plan_set(cluster.observe(key), self.defaults)
        # A watch whose connection broke unnoticed is behind for a while. Objects of a pool that was
        # deleted meanwhile would come back each time that Kubernetes collects them.
        if plan.owners:
            self.enqueue(await cluster.read_pools(plan.owners))
            plan = plan_set(cluster.observe(key), self.defaults)
        refused = await cluster.dry_run_revisions(plan)
        # Before the pods: the kubelet starts none without the Secret that it mounts.
        keys_due = None
        if keyed := pools_with_transfer_keys(plan.pools.values()):
            keys_due, failure = await self.transfer_keys.keep(
                cluster.api,
                cluster.observe(key),
                self.router.key_period,
                touches_pods=plan.touches_pods,
            )
            refused |= dict.fromkeys(keyed, failure) if failure else {}
        # The cache may lag behind the API server. Before pods are created or deleted, plan again
        # from a live list of them, so that no pod is created twice or deleted in vain.
        if plan.touches_pods or refused:
            plan = plan_set(await cluster.observe_live(key), self.defaults, refused)
        # The kubelet starts no pod without the Secret that it mounts, and no watch tells of it.
        if lacking := await cluster.lacking_plan_keys(plan.create_pods):
            self.enqueue(lacking)
            plan = replace(plan, create_pods=())
        done = await cluster.apply(plan)
        # Observed once more: by now the cache has the answers to the writes, and the failures. The
        # status is written even when a write was refused, because it tells the user which.
        for pool, status in statuses(cluster.observe(key), plan).items():
            self.enqueue(await cluster.write_status(pool, status))
        # The answer to a patch may hold someone else's change too, such as a pod's readiness, and
        # its watch event is then no news to the cache.
        if plan.label_pods or plan.adopt:
            self.enqueue({key})
        if lacking or not done:
            raise WritesRefused
        return min((t for t in (plan.requeue_after, keys_due) if t is not None), default=None)

    async def reconcile_endpoint(self, key: EndpointKey) -> float | None:
        """Bring an endpoint's Service, Envoy, EPP and keys to what its pools require.

        Raises as `reconcile_set` does.
        """
        cluster = self.cluster
        await cluster.read_plan_keys(key)
        observed = cluster.observe_endpoint(key)
        plan = plan_endpoint(observed, self.router)
        if plan.creates(observed):
            owners = [pool.key for pool in cluster.cache.pools.by_key(key)]
            self.enqueue(await cluster.read_pools(owners))
            observed = cluster.observe_endpoint(key)
            plan = plan_endpoint(observed, self.router)
        if plan.delete and not observed.pools:
            # A pool of which the cache does not know yet needs them.
            self.enqueue(await cluster.read_decode_pools(key.namespace))
            plan = plan_endpoint(cluster.observe_endpoint(key), self.router)
        done = await cluster.apply_endpoint(key, plan)
        # The sets' pools report the endpoint's state, so their status may need an update.
        state = router_state(cluster.observe_endpoint(key))
        self.enqueue(set(cluster.cache.set_router_state(key, state)))
        if not done:
            if not observed.pools:
                # Without a pool no status has the reasons.
                for ref, failure in cluster.cache.child_failures[key].items():
                    log.warning("%s: %s %s: %s", key, ref.kind, ref.name, failure.message)
            raise WritesRefused
        return plan.requeue_after
