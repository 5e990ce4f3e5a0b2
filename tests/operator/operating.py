"""A real `tandem-operator` process against a real API server, and a substitute for the kubelet."""

import asyncio
import json
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PLURALS, PREFILL_POOL
from tandem_kube.client import Api, connect
from tandem_kube.errors import NotFound
from tandem_kube.resources import PODS, Object, Resource
from tandem_local.ports import free_port

from ..namespaces import enter

DEADLINE = 60.0
PREFILL_POOLS = Resource(labels.API_VERSION, PLURALS[PREFILL_POOL])
DECODE_POOLS = Resource(labels.API_VERSION, PLURALS[DECODE_POOL])

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([f"{__package__}.warmed"])


def _main(flags: list[str], log: Path, network: str | None) -> None:
    if network is not None:
        enter(network)
    with log.open("ab", buffering=0) as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        from tandem_operator.main import main

        main(flags)


class Operator:
    """One operator process with `flags` on its command line, in a network namespace if given."""

    def __init__(self, log: Path, *flags: str, network: str | None = None) -> None:
        self._log = log
        self._health, self._metrics = free_port("127.0.0.1"), free_port("127.0.0.1")
        all_flags = [*flags, *self._ports()]
        self._process = _processes.Process(
            target=_main, args=(all_flags, log, network), daemon=True
        )
        self._process.start()

    def _ports(self) -> tuple[str, str]:
        return (f"--health=127.0.0.1:{self._health}", f"--metrics=127.0.0.1:{self._metrics}")

    async def metrics_page(self) -> str:
        async with aiohttp.request("GET", f"http://127.0.0.1:{self._metrics}/metrics") as page:
            return await page.text()

    async def figure(self, name: str, label: str = "") -> float:
        """The sum of a metric over its labels, or over those series that have `label`; 0 while it
        is missing or there is no answer."""
        (value,) = await self.figures(name, label)
        return value

    async def figures(self, name: str, *labels: str) -> list[float]:
        """The figure of each of `labels`, from one page."""
        try:
            lines = (await self.metrics_page()).splitlines()
        except aiohttp.ClientError:
            return [0.0] * len(labels)
        series = [line for line in lines if line.startswith((name + "{", name + " "))]
        return [
            sum(float(line.split()[-1]) for line in series if label in line) for label in labels
        ]

    async def ready(self) -> bool:
        """Whether its readiness probe succeeds."""
        try:
            async with aiohttp.request("GET", f"http://127.0.0.1:{self._health}/readyz") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    @property
    def log(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def running(self) -> bool:
        return self._process.is_alive()

    def signal(self, number: int) -> None:
        """Send a signal; a process that has ended gets none."""
        if self._process.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def ended(self) -> int:
        """Wait until the process has ended; returns its exit code."""
        await until(lambda: not self.running, self)
        self._process.join()
        return self._process.exitcode or 0


@contextmanager
def operating(log: Path, *flags: str, network: str | None = None) -> Iterator[Operator]:
    """Run an operator until the block ends."""
    operator = Operator(log, *flags, network=network)
    try:
        yield operator
    finally:
        operator.signal(signal.SIGKILL)


@asynccontextmanager
async def api_of(kubeconfig: Path) -> AsyncIterator[Api]:
    async with await connect(kubeconfig) as api:
        yield api


async def until(
    holds: Callable[[], bool | Awaitable[bool]], operator: Operator | None = None
) -> None:
    """Wait until `holds`; a failure shows the operator's log."""
    try:
        async with asyncio.timeout(DEADLINE):
            while not (await result if isinstance(result := holds(), Awaitable) else result):
                await asyncio.sleep(0.05)
    except TimeoutError:
        raise AssertionError(f"not within {DEADLINE:g} s; {operator and operator.log}") from None


def prefill(name: str, namespace: str, **spec: Any) -> Object:
    return _pool(PREFILL_POOL, name, namespace, _MODEL | spec)


def decode(name: str, namespace: str, **spec: Any) -> Object:
    return _pool(DECODE_POOL, name, namespace, spec)


def _pool(kind: str, name: str, namespace: str, spec: dict[str, Any]) -> Object:
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": labels.API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


_MODEL: dict[str, Any] = {
    "model": {"name": "tiny", "source": {"tiny": {}}},
    "engine": {"type": "torch"},
}


async def pods(api: Api, namespace: str) -> list[Object]:
    """The pools' pods that are not being deleted, by name."""
    listing = await api.list(PODS, namespace, labels=labels.POOL)
    staying = [pod for pod in listing.items if "deletionTimestamp" not in pod["metadata"]]
    return sorted(staying, key=lambda pod: str(pod["metadata"]["name"]))


async def names(api: Api, namespace: str) -> list[str]:
    return [pod["metadata"]["name"] for pod in await pods(api, namespace)]


async def set_status(api: Api, namespace: str, name: str, status: Object) -> None:
    """Write a pod's status as the kubelet would."""
    try:
        await api.patch(PODS, name, {"status": status}, namespace, subresource="status")
    except NotFound:
        return


def ready_status() -> Object:
    """The status of a pod that has just become ready."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ready = {"type": "Ready", "status": "True", "lastTransitionTime": now}
    return {"phase": "Running", "podIP": "10.0.0.1", "conditions": [ready]}


@asynccontextmanager
async def kubelet(api: Api, namespace: str) -> AsyncIterator[None]:
    """Make every pod of the namespace ready, until the block ends."""

    ending = asyncio.Event()

    async def run() -> None:
        while not ending.is_set():
            for pod in (await api.list(PODS, namespace)).items:
                if "deletionTimestamp" not in pod["metadata"] and "podIP" not in pod["status"]:
                    await set_status(api, namespace, pod["metadata"]["name"], ready_status())
            await asyncio.sleep(0.1)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        # Not cancelled: a connection that is cancelled in its TLS handshake outlives the event
        # loop, which fails the test.
        ending.set()
        await asyncio.gather(task, return_exceptions=True)


def condition(pool: Object, kind: str) -> dict[str, Any]:
    """A condition of a pool; empty when it has none of that type."""
    conditions = pool.get("status", {}).get("conditions", ())
    return next((entry for entry in conditions if entry["type"] == kind), {})


class AuditedWrites:
    """The writes of `user` except to Leases, from the API server's audit log.

    The log has the requests of all tests before, so it is read on, never again."""

    def __init__(self, audit_log: Path, user: str) -> None:
        self._log, self._user = audit_log, user
        self._size = 0
        self._events: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """All events until now."""
        with self._log.open("rb") as log:
            log.seek(self._size)
            whole, newline, _ = log.read().rpartition(b"\n")
        self._size += len(whole + newline)
        user, lines = self._user.encode(), whole.split(b"\n")
        self._events += filter(self._is_write, (json.loads(line) for line in lines if user in line))
        return self._events

    def _is_write(self, event: dict[str, Any]) -> bool:
        return (
            event["user"]["username"] == self._user
            and event["verb"] not in ("get", "list", "watch")
            and event.get("objectRef", {}).get("resource") != "leases"
        )
