"""The two loops, a screen each: observe → plan (pure) → apply → report."""

from collections.abc import Callable
from dataclasses import dataclass

from ..observed import EndpointKey, SetKey
from ..planning.plan import plan_set
from ..planning.status import statuses
from ..resources.resolve import Defaults
from ..routing.router import plan_endpoint, router_state
from ..routing.router_observed import RouterSettings
from .cluster import Cluster
from .known import WorkKey


class Refused(Exception):
    """The API server refused a write, in words that the status has: try again, ever later."""


@dataclass(frozen=True)
class Loops:
    """What both need; each returns the seconds after which time alone makes another pass due."""

    cluster: Cluster
    defaults: Defaults
    router: RouterSettings
    changed: Callable[[set[WorkKey]], None]

    async def reconcile(self, key: WorkKey) -> float | None:
        if isinstance(key, SetKey):
            return await self.reconcile_set(key)
        return await self.reconcile_endpoint(key)

    async def reconcile_set(self, key: SetKey) -> float | None:
        """Bring a set's revisions, budgets and pods one step nearer to its spec, and say so.

        Raises Refused when the API server refused a write, ApiError when it could not be asked.
        """
        cluster = self.cluster
        plan = plan_set(cluster.observe(key), self.defaults)
        refused = await cluster.refused(plan)
        if plan.touches_pods or refused:
            plan = plan_set(await cluster.observe_live(key), self.defaults, refused)
        done = await cluster.apply(plan)
        for pool, status in statuses(cluster.observe(key), plan).items():
            await cluster.report(pool, status)
        if not done:
            raise Refused
        return plan.requeue_after

    async def reconcile_endpoint(self, key: EndpointKey) -> float | None:
        """Bring an endpoint's Service, Envoy, EPP and keys to what its pools ask for.

        Raises as `reconcile_set` does.
        """
        cluster = self.cluster
        plan = plan_endpoint(cluster.observe_endpoint(key), self.router)
        done = await cluster.apply_endpoint(key, plan)
        state = router_state(cluster.observe_endpoint(key))
        self.changed(set(cluster.known.routed(key, state)))
        if not done:
            raise Refused
        return plan.requeue_after
