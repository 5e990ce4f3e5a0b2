"""A complete Tandem on this machine: the pools' pods, an EPP and Envoy, behind one endpoint.

    async with Stack(pool_sets, port=8080, run_dir=None, console=Console()) as stack:
        stack.endpoint      # http://127.0.0.1:8080
        stack.pods          # names, addresses, metrics URLs

Entering starts everything and returns once Envoy answers a request. If start-up fails, it stops
everything that it started and raises. Errors: `SetupError`, `StartFailed`.
"""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any, Final, Self

import aiohttp
from rich.console import Console

from tandem_contract import endpoints, labels, metrics, ports
from tandem_contract.api_paths import ApiPaths
from tandem_contract.paths import Role
from tandem_operator.pods import external_storage, sidecar_flags
from tandem_operator.pods.containers import STORAGE_PACKAGES
from tandem_operator.pods.manifests import plan_key_secrets, pods, transfer_key_secrets
from tandem_operator.resources.pools import PoolSet
from tandem_operator.resources.resolve import DEFAULTS
from tandem_operator.routing.endpoint.requirements import (
    api_paths,
    max_request_bytes,
    static_router_config,
)
from tandem_operator.routing.envoy.bootstrap import BODY_LIMIT, EnvoySettings, envoy_bootstrap

from . import addresses, router
from .errors import SetupError, StartFailed
from .host import Host
from .pod import RunningPod
from .ports import free_port
from .runner import Runner
from .stack_metrics import scrape
from .state import PodState, RunDir, State, default_run_dir

HOST: Final = "127.0.0.1"
"""Address on which Envoy listens: only this machine can reach it."""
START_TIMEOUT: Final = 600.0
"""Seconds until every pod must be ready. A model of many gigabytes takes minutes to load."""
_ANSWER_TIMEOUT: Final = 30.0
"""Seconds from all pods ready to the first answer through Envoy."""

_KEYS: Final = "plan-keys"
"""Directory below the run directory with the key of this run."""


class Stack:
    """Starts sets of pools with their router; an async context manager, used once."""

    def __init__(
        self,
        pool_sets: Sequence[PoolSet],
        *,
        port: int = ports.ENVOY,
        run_dir: Path | None = None,
        console: Console | None = None,
        start_timeout: float = START_TIMEOUT,
        programs: Mapping[str, Path] | None = None,
    ) -> None:
        """`port` 0 takes a free one. `console` shows progress; None shows nothing.

        `programs`: the file to run for a command that a pod names, such as `vllm`.
        """
        self.run_dir = (run_dir or default_run_dir()).absolute()
        self._pool_sets = pool_sets
        self._port = port or free_port(HOST)
        self._console = console or Console(quiet=True)
        self._start_timeout = start_timeout
        self._host = Host.detect(programs)
        self._runner: Runner | None = None
        # What __aexit__ has to undo; set only when start-up has succeeded.
        self._cleanup: AsyncExitStack | None = None

    @property
    def endpoint(self) -> str:
        """URL of Envoy, without a path."""
        return f"http://{HOST}:{self._port}"

    @property
    def pods(self) -> tuple[PodState, ...]:
        """The pods in their current state, EPP and Envoy last."""
        return tuple(map(_pod_state, self._runner.pods.values())) if self._runner else ()

    @property
    def epp_metrics(self) -> str:
        """URL of the EPP's metrics."""
        epp = next(pod for pod in self.pods if pod.name == router.EPP)
        return f"http://{epp.address}:{ports.EPP_METRICS}{endpoints.METRICS}"

    def update_routing(self, pool_sets: Sequence[PoolSet]) -> bool:
        """Give the EPP the routing settings of `pool_sets`, such as `routing.split`, and the
        sidecars theirs; they reload them. False, and nothing is changed, if the pods would differ
        from the running ones in anything else."""
        manifests = _manifests(pool_sets)
        before = _manifests(self._pool_sets)
        if self._runner is None or list(map(_fixed, manifests)) != list(map(_fixed, before)):
            return False
        self._runner.replace_annotations(manifests)
        self._pool_sets = pool_sets
        self._write_router_config(
            {pod.name: pod.address for pod in self.pods if pod.role is not None}
        )
        return True

    async def __aenter__(self) -> Self:
        """Start everything; returns once requests are served. Raises SetupError, StartFailed."""
        envoy = router.find_envoy()
        # Checked here, so that the message names the flag; Envoy's own would be in its log only.
        if not addresses.is_free(HOST, self._port):
            raise SetupError(f"port {self._port} of {HOST} is in use: choose another with --port")
        # If anything below fails, the exit stack undoes what was done so far, in reverse order:
        # the state file is removed and the lock released only after the last process has ended.
        async with AsyncExitStack() as cleanup:
            run_dir = cleanup.enter_context(RunDir(self.run_dir))
            runner = self._runner = self._new_runner()
            cleanup.push_async_callback(self._stop, runner)
            self._prepare(runner, envoy)
            publishing = asyncio.create_task(self._publish(runner, run_dir), name="publish state")
            cleanup.push_async_callback(_cancel, publishing)
            await self._start(runner)
            self._cleanup = cleanup.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop everything; returns when no process is left."""
        if self._cleanup is not None:
            await self._cleanup.aclose()

    def _new_runner(self) -> Runner:
        # The logs of the previous run were kept until now.
        shutil.rmtree(self.run_dir / "pods", ignore_errors=True)
        keys = self.run_dir / _KEYS
        router.write_plan_key(keys)
        sets = self._pool_sets
        secrets = dict.fromkeys(plan_key_secrets(sets) | transfer_key_secrets(sets), keys)
        return Runner(self.run_dir, secrets=secrets, host=self._host)

    def _prepare(self, runner: Runner, envoy: Path) -> None:
        """Check all pods and write the router's configuration; starts nothing."""
        keys = self.run_dir / _KEYS
        # In order of reference: the EPP's configuration names the pods' addresses, and Envoy's
        # bootstrap names the EPP's.
        pool_pods = runner.add(_manifests(self._pool_sets))
        config = self._write_router_config({pod.spec.name: pod.spec.address for pod in pool_pods})
        decodes = [pool for pool_set in self._pool_sets for pool in pool_set.decodes]
        limit = max_request_bytes(decodes)
        (epp,) = runner.add([router.epp_pod(config, keys, limit)])
        bootstrap = self.run_dir / "envoy.json"
        (proxy,) = runner.add([router.envoy_pod(envoy, bootstrap)])
        settings = EnvoySettings(
            epp_address=epp.spec.address,
            fallback=_fallback_addresses(pool_pods),
            listen_address=HOST,
            listen_port=self._port,
            admin_address=proxy.spec.address,
            body_limit=limit or BODY_LIMIT,
            api=ApiPaths(api_paths(decodes)),
        )
        router.write_json(bootstrap, envoy_bootstrap(settings))

    def _write_router_config(self, pod_addresses: Mapping[str, str]) -> Path:
        config = static_router_config(self._pool_sets, pod_addresses)
        return router.write_json(self.run_dir / "router.yaml", config)

    async def _start(self, runner: Runner) -> None:
        all_pods = tuple(runner.pods.values())
        clock = asyncio.get_running_loop().time
        started = clock()

        def show_ready(pod: RunningPod) -> None:
            name, address = pod.spec.name, pod.spec.address
            self._print(f"  {name} ready at {address} ({clock() - started:.1f} s)")
            pending = [pod.spec.name for pod in all_pods if not pod.ready]
            status.update(f"Waiting for {', '.join(pending) or 'the first answer'}")

        self._print(f"Starting {len(all_pods)} pods; logs in {self.run_dir / 'pods'}")
        with self._console.status("Starting") as status:
            # All at once: loading the models takes longest, and no pod needs another one to start.
            runner.start(all_pods)
            await runner.wait_ready(all_pods, timeout=self._start_timeout, on_ready=show_ready)
            # Ready pods are not enough: the EPP must have checked them before it can choose one.
            await self._wait_until_serving()

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    async def _wait_until_serving(self) -> None:
        """Return once every pod is healthy for the EPP and Envoy answers a list of models."""
        problem = "no request was sent to it"
        async with aiohttp.ClientSession() as http:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT):
                    while True:
                        problem = await self._serving_problem(http)
                        if not problem:
                            return
                        await asyncio.sleep(0.1)
            except TimeoutError:
                raise StartFailed(f"all pods are ready, but {problem}") from None

    async def _serving_problem(self, http: aiohttp.ClientSession) -> str:
        """Why requests would not be served correctly yet; empty if they would."""
        page = await scrape(http, self.epp_metrics)
        health = page.totals_by_label(metrics.EPP_HEALTHY, "backend")
        # The EPP does not choose a pod before its first health check. Until it knows every pod it
        # may send both phases of a request to a prefill pod.
        unhealthy = ", ".join(pod for pod, value in health.items() if not value)
        if unhealthy or not health:
            return f"the EPP has no successful health check of {unhealthy or 'any pod'}"
        url = f"{self.endpoint}{endpoints.MODELS}"
        with suppress(aiohttp.ClientError):
            async with http.get(url) as answer:
                if answer.status == 200:
                    return ""
                return f"GET {url} returns status {answer.status}: {await answer.text()}"
        return f"GET {url} gets no answer"

    async def _stop(self, runner: Runner) -> None:
        with self._console.status("Stopping"):
            await runner.stop()
        # Logs and the router's configuration are kept for the user until the next run.
        for directory in (self.run_dir / _KEYS, *self.run_dir.glob("pods/*/volumes")):
            shutil.rmtree(directory, ignore_errors=True)

    async def _publish(self, runner: Runner, run_dir: RunDir) -> None:
        """Write the state file now and after every change of a pod."""
        while True:
            # No await between writing and waiting, so no change is missed.
            run_dir.write(State(os.getpid(), self.endpoint, self.pods))
            await runner.changes.wait()


def _manifests(pool_sets: Sequence[PoolSet]) -> list[dict[str, Any]]:
    manifests = [pod for pool_set in pool_sets for pod in pods(pool_set)]
    for pod in manifests:
        for container in pod["spec"].get("initContainers", ()):
            # No image is pulled, so a pool's own one counts as the installation's.
            if container["name"] == STORAGE_PACKAGES:
                container["image"] = DEFAULTS.vllm_storage_image
    return manifests


def _fixed(pod: Mapping[str, Any]) -> dict[str, Any]:
    """A Pod without what may change while it runs."""
    return dict(external_storage.with_bounds(sidecar_flags.with_flags(pod, ""), ""))


def _fallback_addresses(pods: Sequence[RunningPod]) -> tuple[str, ...]:
    """The sidecars to which Envoy sends a request for which the EPP chose no pod."""
    # Prefill pods have no sidecar, and only sidecars take requests from Envoy.
    specs = [pod.spec for pod in pods if pod.spec.labels.get(labels.ROLE) != Role.PREFILL]
    if not specs:
        raise SetupError("no DecodePool with a replica: nothing would answer a request")
    return tuple(f"{spec.address}:{ports.SIDECAR}" for spec in specs)


async def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _pod_state(pod: RunningPod) -> PodState:
    listen_ports = {port for container in pod.spec.all_containers for port in container.ports}
    role = pod.spec.labels.get(labels.ROLE)
    has_sidecar = ports.SIDECAR_ADMIN in listen_ports
    engine_port = ports.ENGINE_DECODE if has_sidecar else ports.ENGINE_PREFILL
    base = f"http://{pod.spec.address}"
    sidecar_metrics = f"{base}:{ports.SIDECAR_ADMIN}{endpoints.METRICS}"
    return PodState(
        name=pod.spec.name,
        role=Role(role) if role else None,
        model=pod.spec.labels.get(labels.MODEL, ""),
        address=pod.spec.address,
        ready=pod.ready,
        restarts=pod.restarts,
        pids=pod.pids,
        engine_metrics=f"{base}:{engine_port}{endpoints.METRICS}" if role else None,
        sidecar_metrics=sidecar_metrics if has_sidecar else None,
    )
