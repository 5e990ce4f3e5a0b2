"""Runs pods on this machine: gives them addresses and volumes, waits for readiness, stops them."""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from . import addresses, downward_api
from .container import Container
from .errors import SetupError, StartFailed
from .host import Host
from .pod import ChangeSignal, PodInstance, RunningPod
from .pod_parser import parse_pod, pod_name
from .pod_spec import PodSpec
from .process import tail


class Runner:
    """Runs pods on this machine below one directory.

    runner = Runner(run_dir, secrets={"keys": directory})
    pods = runner.add(documents)
    runner.start(pods)
    await runner.wait_ready(pods)
    …
    await runner.stop()
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        secrets: Mapping[str, Path] | None = None,
        host: Host | None = None,
        stop_timeout: float = 10.0,
    ) -> None:
        """`secrets`: secret name → directory of its files. `stop_timeout`: seconds that `stop`
        gives each pod."""
        self.changes = ChangeSignal()
        """Notified after each change of a pod's or container's state."""
        self.pods: dict[str, RunningPod] = {}
        self._run_dir = run_dir
        self._secrets = dict(secrets or {})
        self._host = host or Host.detect()
        self._documents: dict[str, Mapping[str, Any]] = {}
        """The Pods by name; a replacement is made of its pod's present document."""
        self._stop_timeout = stop_timeout
        # For the probes of all containers. Created in `_build`, closed in `stop`.
        self._http: aiohttp.ClientSession | None = None

    def add(self, documents: Sequence[Mapping[str, Any]]) -> tuple[RunningPod, ...]:
        """Check the Pods and give each an address; starts nothing. Raises SetupError."""
        names = [pod_name(document) for document in documents]
        for name in names:
            if names.count(name) > 1 or name in self.pods:
                raise SetupError(f"pod {name}: two pods have this name: give each its own")
        # Parse once with a placeholder: the addresses depend on the ports that the pods listen on.
        specs = [self._parse(document, addresses.PLACEHOLDER) for document in documents]
        ports = {spec.name: [p for c in spec.all_containers for p in c.ports] for spec in specs}
        # The number of pods is part of the seed, so that each call gets a network of its own.
        pod_addresses = addresses.allocate(ports, f"{self._run_dir}/{len(self.pods)}")
        self._documents.update(zip(names, documents, strict=True))
        added = tuple(
            RunningPod(
                partial(self._build, name, pod_addresses[name]), self.changes, self._stop_timeout
            )
            for name in names
        )
        self.pods.update((pod.spec.name, pod) for pod in added)
        return added

    def replace_annotations(self, documents: Sequence[Mapping[str, Any]]) -> None:
        """Take `documents`, the Pods of the same names with other annotations, and write the files
        that their downwardAPI volumes make of these, as the kubelet does."""
        for document in documents:
            name = pod_name(document)
            self._documents[name] = document
            for volume in document["spec"].get("volumes") or ():
                if "downwardAPI" in volume:
                    path = self._pod_volume(name, volume["name"])
                    downward_api.write_files(document, volume, path)

    def start(self, pods: Sequence[RunningPod]) -> None:
        """Start `pods` in the background, all at once."""
        for pod in pods:
            pod.start()

    async def wait_ready(
        self,
        pods: Sequence[RunningPod],
        *,
        timeout: float = 300.0,
        on_ready: Callable[[RunningPod], None] = lambda _pod: None,
    ) -> None:
        """Return once all pods are ready; calls `on_ready` with each pod when it becomes ready.

        Raises StartFailed if a container ends before that, or after `timeout` seconds.
        """
        pending = list(pods)

        def all_ready_or_one_failed() -> bool:
            # A list of its own, because the loop removes from `pending`.
            for pod in [pod for pod in pending if pod.ready]:
                pending.remove(pod)
                on_ready(pod)
            return all(pod.ready for pod in pods) or any(pod.failed_container() for pod in pods)

        try:
            async with asyncio.timeout(timeout):
                await self.changes.wait_until(all_ready_or_one_failed)
        except TimeoutError:
            slow = next(pod for pod in pods if not pod.ready)
            container = next(c for c in slow.containers if not c.ready)
            raise StartFailed(
                _failure_message(slow, container, f"not ready after {timeout:.0f} s")
            ) from None
        for pod in pods:
            if (failed := pod.failed_container()) is not None:
                raise StartFailed(
                    _failure_message(pod, failed, f"exited with code {failed.exit_code}")
                )

    async def stop(self) -> None:
        """Stop every pod, all at once; returns when none of their processes is left."""
        stops = (pod.stop() for pod in self.pods.values())
        # return_exceptions: a pod that cannot be stopped must not keep the others running.
        results = await asyncio.gather(*stops, return_exceptions=True)
        self.pods.clear()
        # Closed after the pods have stopped, because their preStop hooks use it.
        if self._http is not None:
            await self._http.close()
            self._http = None
        for result in results:
            if result is not None:
                raise result

    def _parse(self, document: Mapping[str, Any], address: str) -> PodSpec:
        return parse_pod(document, address=address, volume=partial(self._volume, document))

    def _pod_volume(self, pod: str, name: str) -> Path:
        return self._run_dir / "pods" / pod / "volumes" / name

    def _volume(self, document: Mapping[str, Any], name: str, raw: Mapping[str, Any]) -> Path:
        """The directory for one volume of a pod; a new empty one for an emptyDir."""
        pod = pod_name(document)
        if "hostPath" in raw:
            path = Path(raw["hostPath"]["path"])
            if not path.exists():
                raise SetupError(
                    f"pod {pod}: volume {name}: {path} does not exist on this machine: "
                    "create it, or name another path in the YAML"
                )
            return path
        if "secret" in raw:
            secret = raw["secret"]["secretName"]
            if secret not in self._secrets:
                raise SetupError(
                    f"pod {pod}: volume {name}: secret {secret!r} does not exist on this machine"
                )
            return self._secrets[secret]
        if "emptyDir" not in raw and "downwardAPI" not in raw:
            raise SetupError(
                f"pod {pod}: volume {name}: the local runner supports emptyDir, hostPath, secret "
                "and downwardAPI volumes only"
            )
        path = self._pod_volume(pod, name)
        # A replaced pod starts with empty volumes.
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        if "downwardAPI" in raw:
            downward_api.write_files(document, raw, path)
        return path

    def _build(self, name: str, address: str) -> PodInstance:
        pod = self._parse(self._documents[name], address)
        if self._http is None:
            # As the kubelet does: a new connection for each probe. A kept one would answer although
            # the server accepts no new connections.
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        directory = self._run_dir / "pods" / pod.name
        directory.mkdir(parents=True, exist_ok=True)
        containers = {}
        for raw in pod.all_containers:
            spec, env = self._host.prepare(pod, raw)
            containers[spec.name] = Container(
                spec,
                env=env,
                log=directory / f"{spec.name}.log",
                http=self._http,
                on_change=self.changes.notify,
            )
        init = [(containers[spec.name], is_sidecar) for spec, is_sidecar in pod.init]
        return PodInstance(pod, init, [containers[spec.name] for spec in pod.containers])


def _failure_message(pod: RunningPod, container: Container, event: str) -> str:
    """The event, its reason if that is known, and the end of the container's log."""
    reason = f" ({container.reason})" if container.reason else ""
    lines = [f"  | {line}" for line in tail(container.log)]
    name = f"{pod.spec.name}/{container.spec.name}"
    return "\n".join([f"{name}: {event}{reason}; its log, {container.log}:", *lines])
