"""Pods on this machine: addresses, volumes, readiness of all, the end of all."""

import asyncio
import shutil
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from . import addresses
from .container import Container
from .errors import Refused, StartFailed
from .machine import Machine
from .pod import Changes, Incarnation, RunningPod
from .podparse import parse_pod, pod_name
from .podspec import PodSpec
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
        machine: Machine | None = None,
        stop_timeout: float = 10.0,
    ) -> None:
        """`secrets`: secret name → directory of its files. `stop_timeout`: seconds, per pod."""
        self.changes = Changes()
        self.pods: dict[str, RunningPod] = {}
        self._run_dir = run_dir
        self._secrets = dict(secrets or {})
        self._machine = machine or Machine.here()
        self._stop_timeout = stop_timeout
        self._http: aiohttp.ClientSession | None = None

    def add(self, documents: Sequence[Mapping[str, Any]]) -> tuple[RunningPod, ...]:
        """Check the Pods and give each an address; nothing is started. Raises Refused."""
        names = [pod_name(document) for document in documents]
        for name in names:
            if names.count(name) > 1 or name in self.pods:
                raise Refused(f"pod {name}: two pods have this name: give each its own")
        checked = [self._parse(document, addresses.UNDECIDED) for document in documents]
        listens = {p.name: [port for c in p.every_container for port in c.ports] for p in checked}
        given = addresses.allocate(listens, f"{self._run_dir}/{len(self.pods)}")
        added = tuple(
            RunningPod(
                partial(self._build, document, given[name]), self.changes, self._stop_timeout
            )
            for name, document in zip(names, documents, strict=True)
        )
        self.pods.update((pod.spec.name, pod) for pod in added)
        return added

    def start(self, pods: Sequence[RunningPod]) -> None:
        """Begin to start `pods`, all at once."""
        for pod in pods:
            pod.start()

    async def wait_ready(
        self,
        pods: Sequence[RunningPod],
        *,
        timeout: float = 300.0,
        progress: Callable[[RunningPod], None] = lambda _pod: None,
    ) -> None:
        """Return once all are ready; `progress` is called with each pod as it becomes so.

        Raises StartFailed when a container ends before, or after `timeout` seconds.
        """
        unseen = list(pods)

        def settled() -> bool:
            for pod in [pod for pod in unseen if pod.ready]:
                unseen.remove(pod)
                progress(pod)
            return all(pod.ready for pod in pods) or any(pod.fallen() for pod in pods)

        try:
            async with asyncio.timeout(timeout):
                await self.changes.until(settled)
        except TimeoutError:
            slow = next(pod for pod in pods if not pod.ready)
            container = next(c for c in slow.containers if not c.ready)
            raise StartFailed(_story(slow, container, f"not ready after {timeout:.0f} s")) from None
        for pod in pods:
            if (fallen := pod.fallen()) is not None:
                raise StartFailed(_story(pod, fallen, f"ended with {fallen.exit_code}"))

    async def stop(self) -> None:
        """End every pod, all at once; returns when no process of theirs is left."""
        stops = (pod.stop() for pod in self.pods.values())
        results = await asyncio.gather(*stops, return_exceptions=True)
        self.pods.clear()
        if self._http is not None:
            await self._http.close()
            self._http = None
        for result in results:
            if result is not None:
                raise result

    def _parse(self, document: Mapping[str, Any], address: str) -> PodSpec:
        pod = pod_name(document)

        def volume(name: str, raw: Mapping[str, Any]) -> Path:
            if "hostPath" in raw:
                path = Path(raw["hostPath"]["path"])
                if not path.exists():
                    raise Refused(
                        f"pod {pod}: volume {name}: {path} does not exist on this machine: "
                        "make it, or name another in the YAML"
                    )
                return path
            if "secret" in raw:
                secret = raw["secret"]["secretName"]
                if secret not in self._secrets:
                    raise Refused(f"pod {pod}: volume {name}: no secret {secret!r} is known here")
                return self._secrets[secret]
            if "emptyDir" not in raw:
                raise Refused(f"pod {pod}: volume {name}: is of no kind the local runner knows")
            path = self._run_dir / "pods" / pod / "volumes" / name
            # Empty for each incarnation.
            shutil.rmtree(path, ignore_errors=True)
            path.mkdir(parents=True)
            return path

        return parse_pod(document, address=address, volume=volume)

    def _build(self, document: Mapping[str, Any], address: str) -> Incarnation:
        pod = self._parse(document, address)
        if self._http is None:
            self._http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True))
        directory = self._run_dir / "pods" / pod.name
        directory.mkdir(parents=True, exist_ok=True)
        made = {}
        for raw in pod.every_container:
            spec, env = self._machine.prepare(pod, raw)
            made[spec.name] = Container(
                spec,
                env=env,
                log=directory / f"{spec.name}.log",
                http=self._http,
                changed=self.changes.notify,
            )
        init = [(made[spec.name], sidecar) for spec, sidecar in pod.init]
        return Incarnation(pod, init, [made[spec.name] for spec in pod.containers])


def _story(pod: RunningPod, container: Container, what: str) -> str:
    reason = f" ({container.reason})" if container.reason else ""
    lines = [f"  | {line}" for line in tail(container.log)]
    name = f"{pod.spec.name}/{container.spec.name}"
    return "\n".join([f"{name}: {what}{reason}; its log, {container.log}:", *lines])
