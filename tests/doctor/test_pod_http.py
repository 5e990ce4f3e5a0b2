"""What is said of a pod that cannot be asked."""

import socket

import aiohttp
import pytest
from aiohttp.abc import AbstractResolver, ResolveResult

from tandem_doctor.pod_http import NoAnswer, direct
from tandem_local.ports import free_port


async def test_a_closed_port_is_named_in_plain_words() -> None:
    port = free_port("127.0.0.1")
    async with aiohttp.ClientSession() as http:
        with pytest.raises(NoAnswer) as error:
            await direct(http, f"http://127.0.0.1:{port}")("/health")
    assert str(error.value) == f"/health: cannot connect to 127.0.0.1:{port}: Connection refused"


class NoNames(AbstractResolver):
    async def resolve(self, host: str, port: int = 0, family: int = 0) -> list[ResolveResult]:
        raise socket.gaierror(socket.EAI_NONAME, f"{host} is unknown")

    async def close(self) -> None:
        pass


async def test_a_name_that_does_not_resolve_is_named() -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(resolver=NoNames())) as http:
        with pytest.raises(NoAnswer, match=r"cannot connect to pod:80: .*pod is unknown"):
            await direct(http, "http://pod:80")("/health")
