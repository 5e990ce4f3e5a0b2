"""`tandem doctor` on one machine, with pairs of real engines that are misconfigured on purpose."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract import environment, ports
from tandem_contract.paths import Role
from tandem_doctor import local_pods
from tandem_doctor.checks import run_checks
from tandem_doctor.facts import Facts
from tandem_doctor.findings import Finding, Severity
from tandem_doctor.gather import gather_facts
from tandem_local.addresses import allocate
from tandem_local.state import PodState, State

from ..engine.engines import tiny_model
from ..local.pods import group_is_gone, until

pytestmark = pytest.mark.component


@asynccontextmanager
async def engine(
    address: str, role: Role, log: Path, *flags: str, **transfer: Any
) -> AsyncIterator[PodState]:
    """A `tandem-engine` process in a group of its own, as a pod of a stack."""
    port = ports.ENGINE_PREFILL if role is Role.PREFILL else ports.ENGINE_DECODE
    config = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_producer" if role is Role.PREFILL else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "engine_id": address,
    } | transfer
    command = [
        # With an option of Python it is no fork, which would have another command line.
        *(sys.executable, "-u", "-m", "tandem_engine.main", "--model", str(tiny_model())),
        *("--host", address, "--port", str(port), "--num-gpu-blocks-override", "64"),
        *("--kv-transfer-config", json.dumps(config), *flags),
    ]
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            env={**os.environ, environment.SIDE_CHANNEL_HOST: address, "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=output,
            process_group=0,
        )
    url = f"http://{address}:{port}"
    try:
        await answers(url, process, log)
        yield PodState(
            *(address, role, "m", address, True, 0),
            pids={"engine": process.pid},
            engine_metrics=f"{url}/metrics",
        )
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGKILL)
        await process.wait()


async def answers(url: str, process: asyncio.subprocess.Process, log: Path) -> None:
    async with asyncio.timeout(60), aiohttp.ClientSession() as http:
        while True:
            assert process.returncode is None, log.read_text()
            try:
                async with http.get(f"{url}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                await asyncio.sleep(0.1)


async def findings(*pods: PodState) -> list[Finding]:
    async with local_pods.targets_of(State(0, "", pods)) as targets:
        facts = Facts(*await gather_facts(targets.pods), gpus=())
    return [f for f in run_checks(facts) if f.severity in (Severity.BROKEN, Severity.WARNING)]


async def test_every_problem_is_found_and_nothing_else(tmp_path: Path) -> None:
    listening = (ports.ENGINE_PREFILL, ports.ENGINE_DECODE, ports.SIDE_CHANNEL)
    at = allocate(dict.fromkeys(("prefill", "good", "broken"), listening), str(tmp_path))
    async with AsyncExitStack() as stack:
        other_model = tmp_path / "another-model"
        other_model.symlink_to(tiny_model())
        prefill, good, broken = await asyncio.gather(
            stack.enter_async_context(engine(at["prefill"], Role.PREFILL, tmp_path / "p")),
            stack.enter_async_context(engine(at["good"], Role.DECODE, tmp_path / "g")),
            stack.enter_async_context(
                engine(
                    *(at["broken"], Role.DECODE, tmp_path / "b"),
                    *("--model", str(other_model)),
                    *("--dtype", "float64", "--block-size", "8", "--max-model-len", "256"),
                    kv_role="kv_producer",
                    kv_load_failure_policy="fail",
                )
            ),
        )
        assert await findings(prefill, good) == []

        problems = await findings(prefill, broken)
        assert {(f.check, f.detail.partition(":")[0]) for f in problems} == {
            ("role", "the engine of a decode pod has kv_role kv_producer, not kv_consumer"),
            ("compatible", "model"),
            ("compatible", "dtype"),
            ("compatible", "blockSize"),
            ("compatible", "maxModelLen"),
            ("load failure", "kv_load_failure_policy is fail"),
        }
        assert all(f.fix for f in problems)

        group = prefill.pids["engine"]
        os.kill(group, signal.SIGKILL)
        await until(lambda: group_is_gone(group))
        (dead,) = await findings(prefill, good)
        subject = at["prefill"]
        assert (dead.check, dead.severity, dead.subject) == ("reachable", Severity.BROKEN, subject)
