"""Who may drain a sidecar: the pod's own preStop hook, and no other pod.

The sidecar runs in a network namespace with two addresses, its pod's and another pod's.
"""

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tandem_operator.pods.manifests import pods
from tests.cluster.fixtures import LEFT_OUT
from tests.operator.pool_yaml import pair

pytestmark = pytest.mark.component

POD, OTHER_POD = "10.9.0.1", "10.9.0.2"
ISTIO = "127.0.0.6"
"""Istio's proxy connects from here for every client of another pod; Linkerd's from the pod's own
address."""
NAMESPACE = ("unshare", "--map-root-user", "--net")
SIDECAR = f"""
ip link set lo up && ip addr add {POD}/32 dev lo && ip addr add {OTHER_POD}/32 dev lo &&
exec "$0" -m tandem_sidecar.main --listen {POD}:8000 --admin {POD}:8001 \
  --engine http://{POD}:8200 --prefill-allow 10.0.0.0/8
"""
ASK = """
import http.client, sys
source, method, path = sys.argv[1:]
connection = http.client.HTTPConnection("10.9.0.1", 8001, source_address=(source, 0))
connection.request(method, path)
print(connection.getresponse().status)
"""


@pytest.fixture
async def sidecar(ip_program: None) -> AsyncIterator[asyncio.subprocess.Process]:
    possible = subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True, text=True)
    if possible.returncode != 0:
        pytest.skip(f"{LEFT_OUT}needs network namespaces: {possible.stderr}")
    process = await asyncio.create_subprocess_exec(
        *(*NAMESPACE, "sh", "-c", SIDECAR, sys.executable), stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdout is not None
    async with asyncio.timeout(60):
        log = b""
        while b"serving" not in log:
            line = await process.stdout.readline()
            assert line, log.decode()
            log += line
    yield process
    process.terminate()
    await process.communicate()


async def inside(sidecar: asyncio.subprocess.Process, *command: str, **env: str) -> tuple[int, str]:
    """Exit status and output of `command` in the namespace of the sidecar."""
    process = await asyncio.create_subprocess_exec(
        *("nsenter", f"--target={sidecar.pid}", "--user", "--net", "--preserve-credentials"),
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, **env},
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode().strip()


async def status(
    sidecar: asyncio.subprocess.Process, source: str, path: str, method: str = "GET"
) -> str:
    return (await inside(sidecar, sys.executable, "-c", ASK, source, method, path))[1]


async def test_only_the_pod_itself_can_drain_it(sidecar: asyncio.subprocess.Process) -> None:
    for source in (OTHER_POD, ISTIO, POD):
        assert await status(sidecar, source, "/livez") == "200"
        for path in ("/drain", "/drain?wait=true"):
            assert await status(sidecar, source, path, "POST") == "403"
            assert await status(sidecar, source, path, "GET") == "405"
    _, state = await inside(
        *(sidecar, "python3", "-c"),
        "import urllib.request; print(urllib.request.urlopen('http://10.9.0.1:8001/state').read())",
    )
    assert '"draining": false' in state

    engine: dict[str, Any] = pods(pair()[0])[-1]["spec"]["containers"][0]
    python, *hook = engine["lifecycle"]["preStop"]["exec"]["command"]
    assert python == "python3"
    assert await inside(sidecar, sys.executable, *hook, POD_IP=POD) == (0, "")
    assert await status(sidecar, POD, "/readyz") == "503"


async def test_a_drain_that_is_refused_fails_the_hook(sidecar: asyncio.subprocess.Process) -> None:
    engine: dict[str, Any] = pods(pair()[0])[-1]["spec"]["containers"][0]
    _, *hook, _ = engine["lifecycle"]["preStop"]["exec"]["command"]
    code, output = await inside(sidecar, sys.executable, *hook, "/nowhere", POD_IP=POD)
    assert code == 1
    assert "/nowhere: 404" in output
