"""A whole Tandem on this machine: the pools' pods, an EPP and Envoy, behind one endpoint.

    async with Stack(sets, port=8080, run_dir=None, console=Console()) as stack:
        stack.endpoint      # http://127.0.0.1:8080
        stack.pods          # names, addresses, metrics URLs

Entering returns when a request through Envoy is answered, or raises and leaves nothing behind.
Errors: `Refused`, `StartFailed`.
"""

import asyncio
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final, Self

import aiohttp
from rich.console import Console

from tandem_contract import labels, metrics, ports
from tandem_contract.paths import Role
from tandem_operator.pods.manifests import plan_key_secrets, pods
from tandem_operator.resources.pools import PoolSet
from tandem_operator.routing.envoy import EnvoySettings, envoy_bootstrap
from tandem_operator.routing.static import router_config

from . import addresses, router
from .errors import Refused, StartFailed
from .machine import Machine
from .observe import read_page
from .pod import RunningPod
from .runner import Runner
from .state import PodState, RunDir, State, default_run_dir

HOST: Final = "127.0.0.1"
"""Where Envoy listens: this machine alone can reach it."""
START_TIMEOUT: Final = 600.0
"""Seconds until every pod must be ready. A model of many gigabytes needs minutes to load."""
_ANSWER_TIMEOUT: Final = 30.0
"""Seconds from all pods ready to the first answer through Envoy."""

_KEYS: Final = "plan-keys"
"""Directory of the run's own."""


class Stack:
    """Brings up sets of pools with their router; an async context manager, used once."""

    def __init__(
        self,
        sets: Sequence[PoolSet],
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
        self._sets = sets
        self._port = port or addresses.free_port(HOST)
        self._console = console or Console(quiet=True)
        self._start_timeout = start_timeout
        self._machine = Machine.here(programs)
        self._runner: Runner | None = None
        self._opened: AsyncExitStack | None = None

    @property
    def endpoint(self) -> str:
        """URL of Envoy, without a path."""
        return f"http://{HOST}:{self._port}"

    @property
    def pods(self) -> tuple[PodState, ...]:
        """The pods as they are now, the router's two last."""
        return tuple(map(_state, self._runner.pods.values())) if self._runner else ()

    @property
    def epp_metrics(self) -> str:
        """URL of the EPP's metrics."""
        epp = next(pod for pod in self.pods if pod.name == router.EPP)
        return f"http://{epp.address}:{ports.EPP_METRICS}/metrics"

    async def __aenter__(self) -> Self:
        """Start all, and return when a request would be served. Raises Refused, StartFailed."""
        envoy = router.find_envoy()
        if not addresses.is_free(HOST, self._port):
            raise Refused(f"port {self._port} of {HOST} is in use: choose another with --port")
        async with AsyncExitStack() as opened:
            held = opened.enter_context(RunDir(self.run_dir))
            runner = self._runner = self._new_runner()
            opened.push_async_callback(self._stop, runner)
            self._prepare(runner, envoy)
            publishing = asyncio.create_task(self._publish(runner, held), name="publish state")
            opened.push_async_callback(_cancelled, publishing)
            await self._start(runner)
            self._opened = opened.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop all; returns when no process is left."""
        if self._opened is not None:
            await self._opened.aclose()

    def _new_runner(self) -> Runner:
        # What is left of an earlier run: its logs were kept until now.
        shutil.rmtree(self.run_dir / "pods", ignore_errors=True)
        keys = self.run_dir / _KEYS
        router.write_plan_key(keys)
        secrets = dict.fromkeys(plan_key_secrets(self._sets), keys)
        return Runner(self.run_dir, secrets=secrets, machine=self._machine)

    def _prepare(self, runner: Runner, envoy: Path) -> None:
        """Everything written and checked, nothing started."""
        keys = self.run_dir / _KEYS
        documents = [pod for pool_set in self._sets for pod in pods(pool_set)]
        serving = runner.add(documents)
        served = {pod.spec.name: pod.spec.address for pod in serving}
        config = router.write_json(self.run_dir / "router.yaml", router_config(self._sets, served))
        (epp,) = runner.add([router.epp_pod(config, keys)])
        bootstrap = self.run_dir / "envoy.json"
        (proxy,) = runner.add([router.envoy_pod(envoy, bootstrap)])
        settings = EnvoySettings(
            epp_address=epp.spec.address,
            fallback=_decodes(serving),
            listen_address=HOST,
            listen_port=self._port,
            admin_address=proxy.spec.address,
        )
        router.write_json(bootstrap, envoy_bootstrap(settings))

    async def _start(self, runner: Runner) -> None:
        everyone = tuple(runner.pods.values())
        clock = asyncio.get_running_loop().time
        began = clock()

        def ready(pod: RunningPod) -> None:
            name, address = pod.spec.name, pod.spec.address
            self._say(f"  {name} ready at {address} ({clock() - began:.1f} s)")
            missing = [pod.spec.name for pod in everyone if not pod.ready]
            status.update(f"Waiting for {', '.join(missing) or 'the first answer'}")

        self._say(f"Starting {len(everyone)} pods; logs in {self.run_dir / 'pods'}")
        with self._console.status("Starting") as status:
            runner.start(everyone)
            await runner.wait_ready(everyone, timeout=self._start_timeout, progress=ready)
            await self._answers()

    def _say(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    async def _answers(self) -> None:
        """Return when the EPP may choose every pod and lists models through Envoy."""
        lacking = "nobody was asked"
        async with aiohttp.ClientSession() as http:
            try:
                async with asyncio.timeout(_ANSWER_TIMEOUT):
                    while True:
                        lacking = await self._lacking(http)
                        if not lacking:
                            return
                        await asyncio.sleep(0.1)
            except TimeoutError:
                raise StartFailed(f"all pods are ready, but {lacking}") from None

    async def _lacking(self, http: aiohttp.ClientSession) -> str:
        """What is not as it should be yet; empty: nothing."""
        page = await read_page(http, self.epp_metrics)
        health = {
            told["backend"]: healthy for name, told, healthy in page if name == metrics.EPP_HEALTHY
        }
        # Until it has heard of a pod it does without, and may have a prefill pod serve alone.
        silent = ", ".join(pod for pod, healthy in health.items() if not healthy)
        if silent or not health:
            return f"the endpoint picker has no answer yet of {silent or 'any'}"
        url = f"{self.endpoint}/v1/models"
        with suppress(aiohttp.ClientError):
            async with http.get(url) as answer:
                if answer.status == 200:
                    return ""
                return f"{url} is not served: status {answer.status}: {await answer.text()}"
        return f"{url} is not served"

    async def _stop(self, runner: Runner) -> None:
        with self._console.status("Stopping"):
            await runner.stop()
        # The logs and the router's configuration stay, to be looked at.
        for made in (self.run_dir / _KEYS, *self.run_dir.glob("pods/*/volumes")):
            shutil.rmtree(made, ignore_errors=True)

    async def _publish(self, runner: Runner, held: RunDir) -> None:
        while True:
            held.write(State(os.getpid(), self.endpoint, self.pods))
            await runner.changes.next()


def _decodes(pods: Sequence[RunningPod]) -> tuple[str, ...]:
    """Where Envoy sends a request that the EPP did not place."""
    found = [pod.spec for pod in pods if pod.spec.labels.get(labels.ROLE) != Role.PREFILL]
    if not found:
        raise Refused("no DecodePool with a replica: nothing would answer a request")
    return tuple(f"{spec.address}:{ports.SIDECAR}" for spec in found)


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


def _state(pod: RunningPod) -> PodState:
    listens = {port for container in pod.spec.every_container for port in container.ports}
    role = pod.spec.labels.get(labels.ROLE)
    has_sidecar = ports.SIDECAR_ADMIN in listens
    engine = ports.ENGINE_DECODE if has_sidecar else ports.ENGINE_PREFILL
    at = f"http://{pod.spec.address}"
    return PodState(
        name=pod.spec.name,
        role=Role(role) if role else None,
        model=pod.spec.labels.get(labels.MODEL, ""),
        address=pod.spec.address,
        ready=pod.ready,
        restarts=pod.restarts,
        pids=pod.pids,
        engine_metrics=f"{at}:{engine}/metrics" if role else None,
        sidecar_metrics=f"{at}:{ports.SIDECAR_ADMIN}/metrics" if has_sidecar else None,
    )
