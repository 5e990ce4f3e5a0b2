"""Keys of a store are in no object that the operator writes on a real API server, in no event and
in no log: pods name the Secret, which the kubelet mounts."""

from base64 import b64encode
from pathlib import Path

import pytest

from tandem_kube.errors import Invalid
from tandem_kube.resources import EVENTS

from ..cluster.control_plane import ControlPlane
from ..kvstore.servers import ACCESS_KEY, SECRET_KEY
from .operating import (
    DECODE_POOLS,
    PREFILL_POOLS,
    api_of,
    condition,
    decode,
    kubelet,
    operating,
    prefill,
    until,
)

pytestmark = pytest.mark.control_plane

PASSWORD = "a-password-that-must-not-appear"
STORE = {
    "endpoint": "http://store:8080",
    "kvNamespace": "bucket/kv",
    "credentialsSecretRef": {"name": "store"},
    "image": "registry/storage:1",
}
KINDS = (
    "prefillpools,decodepools,pods,configmaps,services,deployments,controllerrevisions,"
    "serviceaccounts,poddisruptionbudgets,networkpolicies,events"
)


async def test_keys_of_a_store_are_in_no_object_event_or_log(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    flags = f"--kubeconfig={crds.kubeconfig}", f"--namespace={namespace}", "--no-leader-elect"
    keys = (f"--from-literal=access_key={ACCESS_KEY}", f"--from-literal=secret_key={SECRET_KEY}")
    crds.kubectl("create", "secret", "generic", "store", f"--namespace={namespace}", *keys)
    async with api_of(crds.kubeconfig) as api, kubelet(api, namespace):
        stored = prefill("p", namespace, replicas=1, transfer={"storage": STORE})
        await api.create(PREFILL_POOLS, stored)
        await api.create(DECODE_POOLS, decode("d", namespace, prefillRef={"name": "p"}))

        async def is_paired() -> bool:
            pool = await api.get(DECODE_POOLS, "d", namespace)
            return condition(pool, "PeerReady").get("status") == "True"

        async def has_events() -> bool:
            return bool((await api.list(EVENTS, namespace)).items)

        with operating(tmp_path / "operator.log", *flags) as operator:
            await until(is_paired, operator)
            await until(has_events, operator)
            url = f"http://user:{PASSWORD}@store:8080"
            wrong = prefill("q", namespace, transfer={"storage": {**STORE, "endpoint": url}})
            with pytest.raises(Invalid) as refused:
                await api.create(PREFILL_POOLS, wrong)
            page = await operator.metrics_page()
    shown = {
        "objects and events": crds.kubectl("get", KINDS, f"--namespace={namespace}", "-o", "yaml"),
        "refusal": str(refused.value),
        "metrics": page,
        "log": operator.log,
    }
    # The pods get the keys, by the Secret's name.
    assert "secretName: store" in shown["objects and events"]
    for where, text in shown.items():
        assert text, where
        for key in (ACCESS_KEY, SECRET_KEY, PASSWORD):
            assert key not in text, where
            # As Secrets hold it.
            assert b64encode(key.encode()).decode() not in text, where
