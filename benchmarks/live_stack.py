"""A stack that `tandem up` runs, with the torch engine and a tiny model: for benchmarks.

    async with tandem_up(Pools(directory, prefills=1, decodes=2)) as stack:
        stack.endpoint                              # URL for clients
        await stack.route(RANDOM)                   # another EndpointPickerConfig, while it runs
        await stack.decisions(100)                  # what the EPP decided last

`directory` holds the model, the pools and the run directory with the pods' logs. At the end the
command is interrupted as by Ctrl-C, and ends its processes.
"""

import asyncio
import json
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from tandem_contract import endpoints, labels, ports
from tandem_contract.metrics_page import MetricsPage
from tandem_contract.trace import DecisionTrace
from tandem_engine.tiny import make_tiny_model
from tandem_local import router
from tandem_local.ports import free_port
from tandem_local.state import read_state

from . import paced_engine

MODEL: Final = "live"
"""Model name in requests."""
CONTEXT: Final = 8192
"""Most tokens of a prompt and its answer together."""
STEP_TOKENS: Final = 256
"""Tokens that an engine computes per step: scaled as the prompts are. With vLLM's thousands, an
engine would compute ten of the scaled prompts at once, and none of the trace's own."""
PickerConfig = Mapping[str, Any]
"""An EndpointPickerConfig; empty: the default cost."""
BY_COST: Final[PickerConfig] = {}
RANDOM: Final[PickerConfig] = {
    "plugins": [{"type": "random-picker"}, {"type": "prefix-based-pd-decider"}]
}
"""Any decode pod and any prefill pod; split from 128 uncached prompt tokens on, as by llm-d's
default decider."""
_LOG_LINES: Final = 30
"""Lines of the command's output that an error shows."""
_RELOAD_SECONDS: Final = 20.0
"""Seconds until a changed configuration is in use: the command and the EPP poll each second."""
_STOP_SECONDS: Final = 60.0
"""Seconds for which the command may stop its pods."""


class UpFailed(RuntimeError):
    """`tandem up` did not start or did not follow; the message has the end of its output."""


@dataclass(frozen=True, slots=True)
class Pools:
    """What a stack runs."""

    directory: Path
    """An empty directory."""
    prefills: int
    """Prefill pods."""
    decodes: int
    is_paced: bool = False
    """Whether the engines' steps last as on accelerators of their own: `paced_engine`."""
    layers: int = 4
    """Of the model, unless the engines are paced."""
    hidden: int = 128
    """Its hidden size."""

    @property
    def run_dir(self) -> Path:
        """The run directory of `tandem up`."""
        return self.directory / "run"

    def make_model(self) -> None:
        """Write the model: the demo's, or one whose steps never take longer than their pace."""
        directory = self.directory / "model"
        if self.is_paced:
            make_tiny_model(directory, layers=1, hidden=32, heads=2, max_position=CONTEXT)
        else:
            sizes = {"layers": self.layers, "hidden": self.hidden}
            make_tiny_model(directory, max_position=CONTEXT, **sizes)

    def write(self, config: PickerConfig) -> Path:
        """Write the pools with this EndpointPickerConfig; returns their file."""
        spec: dict[str, Any] = {
            "model": {"name": MODEL, "source": {"path": str(self.directory / "model")}},
            "engine": {
                "type": "torch",
                "maxModelLen": CONTEXT,
                "extraArgs": [f"--max-num-batched-tokens={STEP_TOKENS}"],
            },
        }
        if self.is_paced:
            # -P: this folder has modules that are named as those of the standard library.
            command = [sys.executable, "-P", str(Path(paced_engine.__file__))]
            containers = [{"name": "engine", "command": command}]
            spec["template"] = {"spec": {"containers": containers}}
        prefill = _pool("PrefillPool", "live-prefill", replicas=self.prefills, **spec)
        spec |= {"prefillRef": {"name": "live-prefill"}, "replicas": self.decodes}
        if config:
            spec["routing"] = {"epp": {"config": config}}
        file = self.directory / "pools.yaml"
        # At once, so that no half of it is read; JSON is YAML.
        draft = self.directory / "pools.yaml.new"
        draft.write_text(
            "\n---\n".join(map(json.dumps, (prefill, _pool("DecodePool", "live", **spec))))
        )
        draft.replace(file)
        return file


class LiveStack:
    """A running `tandem up`."""

    def __init__(self, process: asyncio.subprocess.Process, pools: Pools) -> None:
        self._process, self._pools = process, pools
        self._lines: deque[str] = deque(maxlen=_LOG_LINES)
        self.endpoint = ""
        self._epp = ""

    @property
    def directory(self) -> Path:
        """For files of the benchmark; removed at the end."""
        return self._pools.directory

    async def wait_until_serving(self) -> None:
        """Return when requests are served. Raises UpFailed."""
        await self._line("Serving at")
        state = read_state(self._pools.run_dir)
        self.endpoint = state.endpoint
        address = next(pod.address for pod in state.pods if pod.name == router.EPP)
        self._epp = f"http://{address}:{ports.EPP_METRICS}"

    async def route(self, config: PickerConfig) -> None:
        """Let the EPP choose by `config`; returns when it does. Raises UpFailed."""
        is_cost = config == BY_COST
        async with aiohttp.ClientSession() as http, asyncio.timeout(_RELOAD_SECONDS):
            if await self._predicts(http) == is_cost:
                return
            self._pools.write(config)
            await self._line("Applied")
            while True:
                if await self._predicts(http) == is_cost:
                    return
                await asyncio.sleep(0.2)

    async def decisions(self, count: int) -> list[DecisionTrace]:
        """The `count` latest decisions, newest last."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self._epp}{endpoints.DEBUG_DECISIONS}?limit={count}") as answer,
        ):
            answer.raise_for_status()
            return msgspec.json.decode(await answer.read(), type=list[DecisionTrace])

    async def epp_metrics(self) -> MetricsPage:
        """The EPP's metrics page."""
        async with (
            aiohttp.ClientSession() as http,
            http.get(f"{self._epp}{endpoints.METRICS}") as answer,
        ):
            return MetricsPage.parse(await answer.text())

    async def _predicts(self, http: aiohttp.ClientSession) -> bool:
        """Whether the EPP chooses by cost: whether it predicts the TTFT of a tiny request."""
        body = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 1}
        async with http.post(f"{self.endpoint}/v1/completions", json=body) as answer:
            answer.raise_for_status()
        (decision,) = await self.decisions(1)
        return decision.predicted_ttft is not None

    async def _line(self, start: str) -> None:
        """Wait for a line of the command that begins with `start`."""
        assert self._process.stdout is not None
        while line := (await self._process.stdout.readline()).decode():
            self._lines.append(line)
            if line.startswith(start):
                return
        raise UpFailed("tandem up ended:\n" + "".join(self._lines))


@asynccontextmanager
async def tandem_up(pools: Pools) -> AsyncIterator[LiveStack]:
    """Run these pools. Raises UpFailed."""
    pools.make_model()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli", "up", "-f", str(pools.write(BY_COST))),
        *("--port", str(free_port("127.0.0.1")), "--run-dir", str(pools.run_dir)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        stack = LiveStack(process, pools)
        await stack.wait_until_serving()
        yield stack
    finally:
        await _stop(process)


async def _stop(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGINT)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.communicate()
    except TimeoutError:
        # Its pods end with it.
        process.kill()
        await process.communicate()


def _pool(kind: str, name: str, **spec: object) -> dict[str, Any]:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": kind,
        "metadata": {"name": name},
        "spec": spec,
    }
