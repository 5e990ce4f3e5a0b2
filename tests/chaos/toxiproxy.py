"""Shopify's toxiproxy between two processes: slow, silent or cut TCP connections."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import aiohttp

from tandem_contract.commandline import HostPort
from tandem_local.ports import free_port

from ..cluster import tools
from ..epp.real import process
from ..sidecar.real.pair import until


@dataclass
class Toxiproxy:
    """A running toxiproxy and its HTTP API."""

    url: str
    http: aiohttp.ClientSession

    async def before(self, name: str, upstream: HostPort) -> HostPort:
        """Create the proxy `name` before `upstream`; returns the address to connect to."""
        body = {"name": name, "listen": "127.0.0.1:0", "upstream": str(upstream)}
        async with self.http.post(f"{self.url}/proxies", json=body) as answer:
            proxy = await answer.json()
            assert answer.status == 201, proxy
        host, _, port = proxy["listen"].rpartition(":")
        return HostPort(host, int(port))

    async def poison(self, name: str, kind: str, **attributes: int) -> None:
        """Add the toxic `kind` to the response direction of proxy `name`."""
        body = {"name": kind, "type": kind, "stream": "downstream", "attributes": attributes}
        async with self.http.post(f"{self.url}/proxies/{name}/toxics", json=body) as answer:
            assert answer.status == 200, await answer.text()

    async def cure(self, name: str, kind: str) -> None:
        """Remove the toxic."""
        async with self.http.delete(f"{self.url}/proxies/{name}/toxics/{kind}") as answer:
            assert answer.status == 204, await answer.text()

    async def enable(self, name: str, enabled: bool) -> None:
        """Accept connections, or refuse them and cut those that are open."""
        async with self.http.post(
            f"{self.url}/proxies/{name}", json={"enabled": enabled}
        ) as answer:
            assert answer.status == 200, await answer.text()


@asynccontextmanager
async def toxiproxy() -> AsyncIterator[Toxiproxy]:
    """Run toxiproxy. Raises MissingTool if it is not built."""
    port = free_port("127.0.0.1")
    command = (tools.path("toxiproxy"), "-host", "127.0.0.1", "-port", str(port))
    async with process(*command) as server, aiohttp.ClientSession() as http:
        proxy = Toxiproxy(f"http://127.0.0.1:{port}", http)

        async def answers() -> bool:
            assert server.returncode is None, "toxiproxy exited at start"
            try:
                async with http.get(f"{proxy.url}/version") as answer:
                    return answer.status == 200
            except aiohttp.ClientError:
                return False

        await until(answers)
        yield proxy
