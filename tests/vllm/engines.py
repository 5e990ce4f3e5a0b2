"""Real vLLM on the CPU, started with the command line and environment that the operator renders.

Each engine has an address of its own in 127.0.0.0/8, as a pod of `tandem up` has.
"""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_local import init
from tandem_local.addresses import allocate
from tandem_local.pod_parser import parse_pod
from tandem_local.pod_spec import ContainerSpec
from tandem_local.process import tail
from tandem_operator.pods.manifests import pods

from ..operator.pool_yaml import pair

VENV: Final = Path(__file__).parents[2] / ".venv-vllm"
STARTS_WITHIN: Final = 600.0
"""Seconds; 55 on two quiet cores, most of it imports."""
LEASE: Final = 30.0
"""Seconds a producer keeps KV that nobody reads: the operator's default, said in the pools."""
MODEL_NAME: Final = "tiny"

ON_A_CPU: Final = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # Else the first request for logprobs compiles C++ for a minute or two.
    "TORCHDYNAMO_DISABLE": "1",
    "UCX_TLS": "tcp,sm,self",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}


class Spawned:
    """A command in a process group of its own that ends with this process, however that ends."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        lifeline, self._lifeline = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", init.__file__, str(lifeline), *command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
                # No session, for the reason that tandem_local's processes are in none.
                process_group=0,
                pass_fds=(lifeline,),
            )
        os.close(lifeline)
        self.log = log

    def signal(self, number: signal.Signals) -> None:
        """To every process of the group."""
        os.killpg(self._process.pid, number)

    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill all of it; returns when its first process is gone."""
        if not self.ended():
            self.signal(signal.SIGKILL)
            self._process.wait()
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class Vllm:
    """One engine, with an incarnation for each `start`."""

    def __init__(self, pod: Mapping[str, Any], address: str, directory: Path) -> None:
        self._pod = pod
        self._directory = directory
        [container] = [c for c in pod["spec"]["containers"] if c["name"] == "engine"]
        self.name = str(pod["metadata"]["name"])
        self.address = HostPort(address, container["ports"][0]["containerPort"])
        self.log = directory / f"{self.name}.log"
        self._process: Spawned | None = None

    def start(self) -> None:
        """Begin to start; `wait_ready` awaits the end of it."""
        spec = self.container("engine")
        env = {"PATH": os.environ["PATH"], **spec.env, "USER": "tandem"}
        self._process = Spawned(_as_module(spec.command), env, self.log)

    def container(self, name: str) -> ContainerSpec:
        """A container of the pod, resolved as for a new incarnation."""
        metadata = {**self._pod["metadata"], "uid": uuid.uuid4().hex}
        document = {**self._pod, "metadata": metadata}
        spec = parse_pod(document, address=self.address.host, volume=self._volume)
        return next(c for c in spec.all_containers if c.name == name)

    def wait_ready(self) -> None:
        """Return once /health says 200; fails with the log's end when it never will."""
        deadline = time.monotonic() + STARTS_WITHIN
        while not self.healthy():
            if self.process.ended() or time.monotonic() > deadline:
                raise AssertionError("\n".join([f"{self.name} does not start:", *tail(self.log)]))
            time.sleep(0.2)

    def healthy(self) -> bool:
        """Whether /health answers 200."""
        try:
            with urllib.request.urlopen(self.url(endpoints.HEALTH), timeout=30) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def url(self, path: str) -> str:
        return f"http://{self.address}{path}"

    @property
    def process(self) -> Spawned:
        assert self._process is not None, "not started"
        return self._process

    def end(self) -> None:
        if self._process is not None:
            self._process.end()

    def _volume(self, name: str, volume: Mapping[str, Any]) -> Path:
        if "hostPath" in volume:
            return Path(volume["hostPath"]["path"])
        made = self._directory / f"{self.name}-{name}"
        made.mkdir(exist_ok=True)
        return made


def make_pair(model: Path, directory: Path, **transfer: Any) -> tuple[Vllm, Vllm]:
    """A prefill and a decode engine, not yet started, whose logs go to `directory`."""
    prefill, decode = pods(_pools(model, transfer))
    listening = {
        pod["metadata"]["name"]: [
            port["containerPort"] for c in pod["spec"]["containers"] for port in c["ports"]
        ]
        for pod in (prefill, decode)
    }
    addresses = allocate(listening, seed=str(directory))
    first, second = (
        Vllm(pod, addresses[pod["metadata"]["name"]], directory) for pod in (prefill, decode)
    )
    return first, second


def _pools(model: Path, transfer: Mapping[str, Any]) -> Any:
    engine = {
        "version": "0.32.0",
        "dtype": "float32",
        "blockSize": 32,
        "maxModelLen": 4096,
        "extraArgs": [
            "--enforce-eager",
            # A handshake names every block: with the 32768 of a GiB it takes up to half a minute.
            "--num-gpu-blocks-override=2048",
            "--enable-scale-out",
            "--enable-prompt-tokens-details",
            "--enable-auto-tool-choice",
            "--tool-call-parser=hermes",
        ],
        "env": [{"name": name, "value": value} for name, value in ON_A_CPU.items()],
    }
    source = {"name": MODEL_NAME, "source": {"path": str(model)}}
    prefill = {
        "model": source,
        "accelerator": {"count": 0},
        "engine": engine,
        "transfer": {"bufferDevice": "cpu", "leaseDuration": f"{LEASE:.0f}s", **transfer},
    }
    inherited = {name: engine[name] for name in ("extraArgs", "env")}
    decode = {"accelerator": {"count": 0}, "replicas": 1, "engine": inherited}
    return pair(prefill, decode)[0]


def _as_module(command: Sequence[str]) -> list[str]:
    """`vllm serve MODEL …` for the CPU build, whose distribution that command does not know."""
    assert tuple(command[:2]) == ("vllm", "serve")
    module = "vllm.entrypoints.openai.api_server"
    return [str(VENV / "bin/python"), "-m", module, "--model", *command[2:]]


def metric(page: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples that have `labels`; 0 when there is none."""
    wanted = [f"{key}={json.dumps(value)}" for key, value in labels.items()]
    lines = (line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if all(want in line for want in wanted)
    )
