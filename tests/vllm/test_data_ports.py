"""UCX takes connections inside the range of ports that the operator renders, and nowhere else."""

import os
import subprocess

import aiohttp
import pytest

from tandem_contract import headers
from tandem_contract.paths import RoutingPath
from tandem_doctor import processes
from tandem_doctor.data_ports import parse_range

from .api_requests import KINDS
from .engines import VENV, Vllm
from .pairs import Pair

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

AGENT = """
import sys
from nixl._api import nixl_agent, nixl_agent_config
agent = nixl_agent("alone", nixl_agent_config(backends=["UCX"]))
print("ready", flush=True)
sys.stdin.read()
"""
"""The NIXL agent of a vLLM engine, without what else listens in an engine's process."""


def ucx_range(engine: Vllm) -> range:
    allowed = parse_range(engine.container("engine").env["UCX_TCP_PORT_RANGE"])
    assert allowed is not None
    return allowed


async def test_ucx_listens_inside_the_range(pair: Pair, http: aiohttp.ClientSession) -> None:
    completions = KINDS["completions"]
    answer = await pair.handed_off(http, completions, completions.body("A story of ports. " * 20))
    assert answer.headers[headers.ROUTING_PATH] == RoutingPath.PREFILL_THEN_DECODE
    for engine in (pair.prefill, pair.decode):
        # Beside UCX, torch listens in the same process at ports that the kernel chooses.
        listening = processes.listening_ports(engine.process.group)
        assert listening is not None
        assert listening.intersection(ucx_range(engine))


def test_all_ports_of_a_nixl_agent_are_in_the_range(pair: Pair) -> None:
    allowed = ucx_range(pair.prefill)
    variables = {"UCX_TCP_PORT_RANGE": f"{allowed.start}-{allowed.stop - 1}", "UCX_TLS": "all"}
    with subprocess.Popen(
        (VENV / "bin/python", "-c", AGENT),
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as agent:
        assert agent.stdout is not None
        while (line := agent.stdout.readline()) != "ready\n":
            assert line, "it ended"
        listening = processes.listening_ports(agent.pid)
        assert listening
        assert listening <= set(allowed)
