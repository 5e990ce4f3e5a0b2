"""A set of pools whose model a Job downloads from a fake hub on this machine, into a claim."""

import asyncio
import json
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aiohttp import web

from tandem_contract import labels
from tandem_engine.tiny import make_tiny_model
from tests.cluster import network
from tests.operator.fake_hub import REPOSITORY, FakeHub, serving

from .site import SECONDS, TEAM, Site, until

PREFILL, DECODE = "downloaded-prefill", "downloaded"
PODS = f"{labels.POOL} in ({PREFILL},{DECODE}),{labels.ROLE}"
"""Selects the engines' pods; those of the Job have no role."""
_PROGRAM = Path(__file__).with_name("fake_vllm.py")
_VOLUME = "downloaded-models"


class FakeHeldHub(FakeHub):
    """A hub with a tiny model, which sends the tokenizer only after `released`: what a download
    has reached by then can be looked at."""

    def __init__(self, folder: Path) -> None:
        make_tiny_model(folder)
        super().__init__({file.name: file.read_bytes() for file in folder.iterdir()})
        self.released = asyncio.Event()

    async def file(self, request: web.Request) -> web.Response:
        if request.method == "GET" and request.match_info["name"] == "tokenizer.json":
            await self.released.wait()
        return await super().file(request)


@dataclass(frozen=True)
class Download:
    """What a download was seen to do."""

    partly: Any
    """`status.modelPull` when all but the tokenizer's part was downloaded."""
    early_pods: dict[str, str]
    """Pods of the set at that time, which should wait."""
    files: dict[str, int]
    """Bytes of the hub's files."""
    requests: dict[str, int]
    """How often each file was downloaded until pods started."""


async def create(site: Site, folder: Path) -> Download:
    """Create a claim, the folder `claim` of `folder`, and pools that want their model there.

    Returns when their pods start; the hub has ended then.
    """
    hub = FakeHeldHub(folder / "model")
    async with serving(hub, network.HOST_IP):
        _apply(site, folder / "claim", hub.url)
        partly = await asyncio.to_thread(_progress, site)
        early = await asyncio.to_thread(site.pods, PODS)
        hub.released.set()
        await asyncio.to_thread(until, lambda: bool(site.pods(PODS)), "engine pods")
    sizes = {name: len(content) for name, content in hub.files.items()}
    return Download(partly, early, sizes, dict(hub.downloads))


def _apply(site: Site, claim: Path, hub: str) -> None:
    claim.mkdir()
    # The pods' user writes there: a plain folder of the host knows no fsGroup.
    claim.chmod(0o777)
    objects = [*_storage(claim), *_pools(hub)]
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    site.node.kubectl("apply", f"--namespace={TEAM}", "--filename=-", input=listed)


def remove(site: Site) -> None:
    """Delete the pools and their pods, the claim and the volume."""
    site.kubectl("delete", f"decodepool/{DECODE}", f"prefillpool/{PREFILL}", "--ignore-not-found")
    site.kubectl("wait", "--for=delete", "pod", f"--selector={PODS}", f"--timeout={SECONDS}s")
    site.kubectl("delete", "persistentvolumeclaim/hub", "--ignore-not-found")
    site.node.kubectl("delete", f"persistentvolume/{_VOLUME}", "--ignore-not-found")


def ready_pods(site: Site) -> tuple[Any, Any]:
    """The prefill and the decode pod, once they are ready."""
    until(lambda: len(site.pods(PODS)) == 2, "both pools to have a pod")
    wait = ("wait", "--for=condition=Ready", "pod", f"--selector={PODS}")
    site.kubectl(*wait, f"--timeout={SECONDS}s")
    pods = {
        pod["metadata"]["labels"][labels.POOL]: pod
        for pod in site.get("pods", f"--selector={PODS}")["items"]
    }
    return pods[PREFILL], pods[DECODE]


def _progress(site: Site) -> Any:
    """`status.modelPull` once the first part is downloaded."""
    pull: Any = {}

    def has_begun() -> bool:
        nonlocal pull
        pull = site.get("prefillpool", PREFILL).get("status", {}).get("modelPull", {})
        return bool(pull.get("files"))

    until(has_begun, "the first files in the pool's status")
    return pull


def _storage(claim: Path) -> list[dict[str, Any]]:
    shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = shared | {
        "capacity": {"storage": "1Gi"},
        "hostPath": {"path": str(claim)},
        "claimRef": {"namespace": TEAM, "name": "hub"},
    }
    wanted = shared | {"resources": {"requests": {"storage": "1Gi"}}, "volumeName": _VOLUME}
    return [
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": _VOLUME},
         "spec": volume},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "hub"},
         "spec": wanted},
    ]  # fmt: skip


def _pools(hub: str) -> list[dict[str, Any]]:
    program = {"name": "engine", "command": ["python3", "-c", _PROGRAM.read_text()]}
    template = {"spec": {"containers": [program]}}
    # The Job goes online in any case; the engines do not.
    env = [{"name": "HF_ENDPOINT", "value": hub}, {"name": "HF_HUB_OFFLINE", "value": "1"}]
    engine = {
        "image": f"tandem-engine:{version('tandem-llm')}",
        "version": "0.32.0",
        "dtype": "float32",
        "blockSize": 16,
        "maxModelLen": 4096,
        "env": env,
    }
    cache = {"claimName": "hub", "prePull": True}
    prefill = {
        "model": {"name": REPOSITORY, "revision": "v1", "cache": cache},
        "engine": engine,
        "accelerator": {"count": 0},
        "transfer": {"connector": "nixl"},
        "replicas": 1,
        "template": template,
    }
    decode = {
        "prefillRef": {"name": PREFILL},
        "engine": {"env": env},
        "accelerator": {"count": 0},
        "replicas": 1,
        "template": template,
        "routing": {"epp": {"enabled": False}, "envoy": {"enabled": False}},
    }
    kinds = (("PrefillPool", PREFILL, prefill), ("DecodePool", DECODE, decode))
    return [
        {"apiVersion": "tandem.dev/v1alpha1", "kind": kind, "metadata": {"name": name},
         "spec": spec}
        for kind, name, spec in kinds
    ]  # fmt: skip
