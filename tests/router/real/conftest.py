"""Two prefill, two decode engines and a router, all processes."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import pytest
import yaml

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_loadtest.calls import Call

from ...sidecar.processes import Sidecar
from ...sidecar.real.client import ClientResult, ask
from ...sidecar.real.engine import Engine, engines
from ...sidecar.real.page import figure, figures
from ...sidecar.real.pair import until
from ..processes import router


@dataclass
class Routed:
    """A router process and its engines."""

    process: Sidecar
    http: aiohttp.ClientSession

    @property
    def url(self) -> str:
        return self.process.url("")

    async def ask(self, request: Call, request_id: str = "") -> ClientResult:
        return await ask(self.http, self.url, request, (), request_id)

    async def figure(self, name: str, **labels: str) -> float:
        page = await figures(self.process.admin_url(endpoints.METRICS))
        return figure(page, name, **labels)

    async def state(self) -> dict[str, Any]:
        async with self.http.get(self.process.admin_url(endpoints.STATE)) as answer:
            state: dict[str, Any] = await answer.json()
            return state

    async def wait_until_idle(self, *idle: Engine) -> None:
        """Return once the router and the engines run no request, and the engines hold no KV."""

        async def is_idle() -> bool:
            quiet = [await engine.idle() for engine in idle]
            return all(quiet) and not (await self.state())["in_flight"]

        await until(is_idle)

    async def wait_until_ready(self, *backends: str) -> None:
        """Return once these are the backends, all ready."""

        async def is_ready() -> bool:
            listed = (await self.state())["backends"]
            return {each["name"] for each in listed if each["ready"]} == {*backends}

        await until(is_ready)

    async def wait_for_phase(self, phase: str) -> None:
        """Return once a request is at `phase`."""

        async def has_phase() -> bool:
            return phase in [work["phase"] for work in (await self.state())["in_flight"]]

        await until(has_phase)


class Server(Protocol):
    """An engine, or something that stands before one."""

    @property
    def url(self) -> str: ...


@asynccontextmanager
async def routed(
    file: Path,
    engines: Mapping[str, tuple[Server, str]],
    *flags: str,
    serving: Mapping[str, object] | None = None,
    **sections: object,
) -> AsyncIterator[Routed]:
    """A router of `engines`, which are given by name, with their role; ready.

    Without warm-ups, unless `flags` say so: engines then get the test's requests only. `serving`:
    members of `disaggregated_serving`; `sections`: further sections of the file.
    """
    write(file, engines, serving, **sections)
    timeout = aiohttp.ClientTimeout(total=60)
    async with (
        router(file, "--no-warm-up", *flags) as process,
        aiohttp.ClientSession(timeout=timeout) as http,
    ):
        running = Routed(process, http)
        await running.wait_until_ready(*engines)
        yield running


def write(
    file: Path,
    engines: Mapping[str, tuple[Server, str]],
    serving: Mapping[str, object] | None = None,
    **sections: object,
) -> None:
    """Write a router's file; the arguments are those of `routed`."""
    backends = [
        {"name": name, "url": engine.url, "role": role} for name, (engine, role) in engines.items()
    ]
    split = {"enabled": True, **(serving or {})}
    data = {"disaggregated_serving": split, "backends": backends, **sections}
    file.write_text(yaml.safe_dump(data))


@pytest.fixture(scope="package")
def shared_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """The engines, not started."""
    made = engines(
        tmp_path_factory.mktemp("engines"),
        **{"prefill-0": {}, "prefill-1": {}},
        **{"decode-0": {"role": "kv_consumer"}, "decode-1": {"role": "kv_consumer"}},
    )
    try:
        yield dict(zip(("prefill-0", "prefill-1", "decode-0", "decode-1"), made, strict=True))
    finally:
        for engine in made:
            with suppress(ProcessLookupError):
                engine.kill()


@pytest.fixture
def shared(shared_engines: dict[str, Engine], request: pytest.FixtureRequest) -> dict[str, Engine]:
    """The engines, those that no test has started yet not running; after a failed test none."""
    for engine in shared_engines.values():
        engine.kill_after_failure(request.session.testsfailed)
    return shared_engines


__all__ = ["HostPort", "Routed", "routed", "write"]
