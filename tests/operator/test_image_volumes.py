"""model.source.oci on API servers that have image volumes, and that do not."""

from pathlib import Path

import pytest

from tandem_kube.client import connect
from tandem_operator.observed import Failure, PoolKey, PoolResource, SetKey
from tandem_operator.planning.actions import Create, SetPlan
from tandem_operator.planning.revisions import Target, controller_revision, render_template
from tandem_operator.resources.resolve import DEFAULTS
from tandem_operator.runtime.cache import ClusterCache
from tandem_operator.runtime.cluster import Cluster

from ..cluster.control_plane import ControlPlane
from ..cluster.kubectl import Failed
from .pool_yaml import pair

pytestmark = pytest.mark.control_plane

KEY = PoolKey("default", "PrefillPool", "p")


async def dry_run(cluster: ControlPlane) -> dict[PoolKey, Failure]:
    """What the operator finds out about a new revision whose model is in an image."""
    (pool_set,) = pair({"model": {"name": "m", "source": {"oci": {"reference": "registry/m:1"}}}})
    pool = pool_set.prefill
    assert pool is not None
    template = render_template(pool, pool.revision, DEFAULTS)
    resource = PoolResource(KEY, "uid", 1, {}, 0.0, {})
    body = controller_revision(
        resource, Target(pool.revision, pool.compat, None, dict(template)), 1
    )
    plan = SetPlan(SetKey("default", "p"), create_revisions=(Create(KEY, body),))
    async with await connect(cluster.kubeconfig) as api:
        return await Cluster(api, ClusterCache(nodes=False)).dry_run_revisions(plan)


async def test_an_api_server_with_image_volumes_takes_the_pods(control_plane: ControlPlane) -> None:
    assert await dry_run(control_plane) == {}


async def test_one_without_them_is_named_as_the_reason(
    control_plane: ControlPlane, tmp_path: Path
) -> None:
    try:
        # Kubernetes 1.34 has the feature gate turned off.
        with ControlPlane.running(tmp_path, {"emulated_version": "1.34"}) as older:
            refused = await dry_run(older)
    except Failed as err:
        pytest.fail(str(err))
    assert refused[KEY].reason == "NoImageVolumes"
    assert "model.source.oci: this cluster has no image volumes" in refused[KEY].message
