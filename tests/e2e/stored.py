"""A store in the cluster, a set of pools whose KV moves through it, and a vLLM pool beside them."""

import json
import urllib.request
from importlib.metadata import version
from pathlib import Path
from typing import Any

from images import build, oci
from prometheus_client.parser import text_string_to_metric_families

from tandem_contract import labels, metrics, ports
from tandem_kvstore.format.collection import Bounds

from .site import SECONDS, TEAM, Site, until
from .stranger import run_python

PREFILL, DECODE, VLLM = "stored-prefill", "stored", "stored-vllm"
MODEL = "stored-llama"
ENDPOINT = "http://store:8080"
PODS = f"{labels.POOL} in ({PREFILL},{DECODE})"
PYTHON_IMAGE = "docker.io/library/python-without-tandem:1"
"""Python and the libraries that Tandem requires, most of which vLLM's image has, too."""
_TAG = version("tandem-llm")
_ROOT = Path(__file__).parents[2]
_VLLM_POD = f"{labels.POOL}={VLLM}"
# Ends at SIGTERM, which the first process of a container ignores otherwise.
_WAIT = "import signal, sys; signal.signal(signal.SIGTERM, sys.exit); signal.pause()"
USE_PACKAGES = f"""
import asyncio, json
import obstore, xxhash
import tandem_contract, tandem_kvstore, tandem_vllm_storage.scheduler
from tandem_kvstore.location import StoreLocation
from tandem_kvstore.probe import probe_store
packages = (obstore, xxhash, tandem_contract, tandem_kvstore, tandem_vllm_storage)
result = asyncio.run(probe_store(StoreLocation("{ENDPOINT}", "probe")))
print(json.dumps([result.works, result.detail, [package.__file__ for package in packages]]))
"""
"""Prints whether the packages can write to the store and read it, in words, and their files."""


def create(site: Site, folder: Path) -> None:
    """Create the store and the pools. `folder`: for the archive of PYTHON_IMAGE."""
    site.node.load_image(_python_without_tandem(folder))
    objects = [*_store(), *_pools(), _vllm_pool()]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    site.node.kubectl("apply", f"--namespace={TEAM}", "--filename=-", input=listed)


def remove(site: Site) -> None:
    """Delete the pools, their pods and the store."""
    pools = (f"decodepool/{DECODE}", f"decodepool/{VLLM}", f"prefillpool/{PREFILL}")
    site.kubectl("delete", *pools, "--ignore-not-found")
    selector = f"--selector={labels.POOL} in ({PREFILL},{DECODE},{VLLM})"
    site.kubectl("wait", "--for=delete", "pod", selector, f"--timeout={SECONDS}s")
    site.kubectl("delete", "deployment/store", "service/store", "--ignore-not-found", "--now")


def ready_pods(site: Site) -> tuple[Any, Any]:
    """The prefill and the decode pod, once they are ready."""
    pools = (f"prefillpool/{PREFILL}", f"decodepool/{DECODE}")
    site.wait_until_ready(*pools)
    pods = {
        pod["metadata"]["labels"][labels.POOL]: pod
        for pod in site.get("pods", f"--selector={PODS}")["items"]
    }
    return pods[PREFILL], pods[DECODE]


def scale_store(site: Site, replicas: int) -> None:
    """Returns once the pod is gone or ready."""
    site.kubectl("scale", "deployment/store", f"--replicas={replicas}")
    if replicas:
        site.kubectl("rollout", "status", "deployment/store", f"--timeout={SECONDS}s")
    else:
        selector = "--selector=app=store"
        site.kubectl("wait", "--for=delete", "pod", selector, f"--timeout={SECONDS}s")


def reachable(site: Site) -> tuple[str, str]:
    """Status and message of StorageReachable of the PrefillPool; empty before it is stated."""
    conditions = site.get("prefillpool", PREFILL).get("status", {}).get("conditions", ())
    for condition in conditions:
        if condition["type"] == "StorageReachable":
            return condition["status"], condition["message"]
    return "", ""


def have_read(site: Site, capacity: int, max_age: float) -> bool:
    """Whether the engines of the set have read these bounds, by their logs."""
    text = f"the bounds of the store are: {Bounds(capacity, max_age)}"
    return all(text in site.kubectl("logs", pod, "--container=engine") for pod in site.pods(PODS))


def loaded_tokens(decode: Any) -> float:
    """Tokens whose KV the engine of a decode pod has loaded from the store."""
    address = f"{decode['status']['podIP']}:{ports.ENGINE_DECODE}"
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=SECONDS) as page:
        families = text_string_to_metric_families(page.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return sum(
        sample.value
        for sample in samples
        if sample.name == metrics.ENGINE_TIER_LOADED and sample.labels["tier"] == "storage"
    )


def used_packages(site: Site) -> Any:
    """What USE_PACKAGES prints in the engine's container of the vLLM pool."""
    site.kubectl("rollout", "status", "deployment/store", f"--timeout={SECONDS}s")

    def is_running() -> bool:
        pods = site.get("pods", f"--selector={_VLLM_POD}")["items"]
        states = [state for pod in pods for state in pod["status"].get("containerStatuses", ())]
        return any(state["name"] == "engine" and "running" in state["state"] for state in states)

    until(is_running, "the engine's container of the vLLM pool")
    (pod,) = site.pods(_VLLM_POD)
    return run_python(site.node, pod, TEAM, USE_PACKAGES)


def _python_without_tandem(folder: Path) -> Path:
    layers = build.Checkout(_ROOT).layers
    found = []
    for name in ("python", "dependencies"):
        tar, record = layers / f"{name}.tar", json.loads((layers / f"{name}.json").read_text())
        found.append(oci.Layer(tar, record["digest"], tar.stat().st_size))
    archive = folder / "python.tar"
    oci.write_archive(oci.Image(PYTHON_IMAGE, found, environment={"HOME": "/tmp"}), archive)
    return archive


def _store() -> list[dict[str, Any]]:
    selector = {"app": "store"}
    container = {
        "name": "store",
        "image": f"tandem:{_TAG}",
        "command": ["tandem", "store", "--dir", "/kv", "--listen", "0.0.0.0:8080"],
        "readinessProbe": {"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        "volumeMounts": [{"name": "kv", "mountPath": "/kv"}],
        "securityContext": {
            "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
            "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"},
        },
    }  # fmt: skip
    template = {
        "metadata": {"labels": selector},
        "spec": {"containers": [container], "volumes": [{"name": "kv", "emptyDir": {}}]},
    }
    return [
        {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "store"},
         "spec": {"selector": {"matchLabels": selector}, "template": template}},
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "store"},
         "spec": {"selector": selector, "ports": [{"port": 8080}]}},
    ]  # fmt: skip


def _pools() -> list[dict[str, Any]]:
    prefill = {
        "model": {"name": MODEL, "source": {"tiny": {}}},
        "engine": {"type": "torch"},
        "transfer": {"connector": "storage", "storage": {"endpoint": ENDPOINT}},
    }
    # Every prompt is handed off: on a busy node the cost may choose one engine, and then the other
    # one does not meet the store.
    plugins = [{"type": "active-request-scorer"}, {"type": "always-disagg-pd-decider"}]
    routing = {"epp": {"config": {"plugins": plugins}}}
    decode = {"prefillRef": {"name": PREFILL}, "routing": routing}
    return [_pool("PrefillPool", PREFILL, prefill), _pool("DecodePool", DECODE, decode)]


def _vllm_pool() -> dict[str, Any]:
    program = {"name": "engine", "command": ["python3", "-c", _WAIT]}
    spec = {
        "role": "unified",
        "model": {"name": "org/model"},
        "engine": {"type": "vllm", "image": PYTHON_IMAGE, "version": "0.32.0"},
        "accelerator": {"count": 0},
        "transfer": {"storage": {"endpoint": ENDPOINT}},
        "template": {"spec": {"containers": [program]}},
        "routing": {"epp": {"enabled": False}, "envoy": {"enabled": False}},
    }
    return _pool("DecodePool", VLLM, spec)


def _pool(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name}
    return {"apiVersion": "tandem.dev/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}
