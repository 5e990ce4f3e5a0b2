"""Where the backends come from at run time: the part of discovery that the process sees.

The Kubernetes client is imported only where a cluster is needed: it costs memory and start time.
"""

from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Protocol

from prometheus_client.registry import Collector

from ..backends.inference_pool import PoolName, PoolReference
from ..backends.pod_backend import PodSelection
from ..backends.pods import DiscoveredBackend
from ..request.model_rewrites import ModelRewrites, RewriteObject, RewriteRules, read_rewrite
from ..request.objectives import Objectives, read_objective

if TYPE_CHECKING:
    from tandem_kube.client import Api


class Discovery(Protocol):
    """Backends that are watched in a cluster."""

    @property
    def is_known(self) -> bool:
        """Whether the backends have been listed; False: the EPP is not ready."""

    def backends(self, domain_label: str) -> list[DiscoveredBackend]:
        """The backends as last seen. `domain_label` tells the fabric domain of those without
        Tandem's own label."""

    async def run(self) -> None:
        """Keep them current until cancelled."""


class Watch(Protocol):
    """Objects that are watched in a cluster."""

    async def run(self) -> None:
        """Keep them current until cancelled."""


async def connect(stack: AsyncExitStack) -> "Api":
    """A client of the cluster, closed with `stack`. Raises NotConfigured."""
    from tandem_kube.client import connect  # noqa: PLC0415

    return await stack.enter_async_context(await connect())


def discover(
    api: "Api", pods: PodSelection | PoolReference, on_change: Callable[[], None]
) -> tuple[Discovery, Collector]:
    """The discovery of `pods`, as such and as the source of its metrics."""
    from ..backends.kubernetes_discovery import KubernetesDiscovery  # noqa: PLC0415
    from ..backends.pool_discovery import PoolDiscovery  # noqa: PLC0415

    made: KubernetesDiscovery | PoolDiscovery
    if isinstance(pods, PoolReference):
        made = PoolDiscovery(api, pods, on_change)
    else:
        made = KubernetesDiscovery(api, pods, on_change)
    return made, made


def discover_pool_objects(
    api: "Api",
    pool: PoolName,
    rewrites: ModelRewrites,
    objectives: Objectives,
) -> tuple[Watch, ...]:
    """What keeps the rules of `rewrites` and the `objectives` current: those of `pool`."""
    from tandem_kube import resources  # noqa: PLC0415

    from ..backends.pool_objects import PoolObjects  # noqa: PLC0415

    def replace_rules(objects: Iterable[RewriteObject]) -> None:
        rewrites.rules = RewriteRules(objects)

    of_rewrites = (resources.MODEL_REWRITES, resources.OLDER_MODEL_REWRITES)
    of_objectives = (
        resources.OBJECTIVES,
        resources.ALPHA_OBJECTIVES,
        resources.OLDER_OBJECTIVES,
    )
    return (
        PoolObjects(api, pool, of_rewrites, read_rewrite, replace_rules),
        PoolObjects(api, pool, of_objectives, read_objective, objectives.replace),
    )
