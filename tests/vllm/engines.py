"""Real vLLM on the CPU, started with the command line and environment that the operator renders.

Each engine has its own address in 127.0.0.0/8, like a pod of `tandem up`.
"""

import atexit
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
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
from tandem_local.downward_api import write_files
from tandem_local.pod_parser import parse_pod
from tandem_local.pod_spec import ContainerSpec
from tandem_local.process import tail
from tandem_operator.pods.manifests import pods

from ..local.pods import group_is_gone
from ..operator.pool_yaml import pair

VENV_VARIABLE: Final = "TANDEM_TEST_VLLM"
"""Names the directory of another environment than .venv-vllm, with another version of vLLM."""
VENV: Final = Path(os.environ.get(VENV_VARIABLE, Path(__file__).parents[2] / ".venv-vllm"))
STARTS_WITHIN: Final = 600.0
"""Limit in seconds; a start without `preloaded` takes 55 on two busy cores, mostly for imports."""
SERVER: Final = "vllm.entrypoints.openai.api_server"
"""The module that is `vllm serve`; `vllm` of the CPU build looks for another package and fails."""
LEASE: Final = 30.0
"""Seconds that a producer keeps KV which is not read; the operator's default, set in the pools."""
MODEL_NAME: Final = "tiny"
REASONING: Final = (
    "--reasoning-config", '{"reasoning_start_str": "the", "reasoning_end_str": "far"}'
)  # fmt: skip
"""Without it vLLM refuses every thinking budget."""

ON_A_CPU: Final = {
    "HF_HUB_OFFLINE": "1",
    "LMCACHE_TRACK_USAGE": "false",
    "OMP_NUM_THREADS": "1",
    # Without this, the first request for logprobs compiles C++ for one or two minutes.
    "TORCHDYNAMO_DISABLE": "1",
    # vLLM sets it if NIXL is not imported yet; `preloaded` imports it.
    "UCX_RCACHE_MAX_UNRELEASED": "1024",
    "UCX_TLS": "tcp,sm,self",
    # For all engines: the home of each is new, and without a cache vLLM inspects a model's class
    # in a process of its own, for ten seconds.
    "VLLM_CACHE_ROOT": str(Path.home() / ".cache/vllm"),
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
_PRELOADED: Final = Path(__file__).with_name("preloaded.py")
_MODULES: Final = (
    SERVER,
    "vllm.v1.engine.async_llm",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.llama",
)
"""What the processes of an engine import, together with all that these import."""


class Spawned:
    """A command in its own process group; all of it ends when this process ends for any reason."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        inherited: Sequence[int] = (),
    ) -> None:
        lifeline, self._lifeline = os.pipe()
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                (sys.executable, "-I", "-S", init.__file__, str(lifeline), *command),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=dict(env),
                # Not a new session; tandem_local.process explains why.
                process_group=0,
                pass_fds=(lifeline, *inherited),
            )
        os.close(lifeline)
        self.log = log

    def signal(self, number: signal.Signals) -> None:
        """Send the signal to every process of the group."""
        os.killpg(self._process.pid, number)

    @property
    def group(self) -> int:
        """The id of its process group."""
        return self._process.pid

    def ended(self) -> bool:
        return self._process.poll() is not None

    def end(self) -> None:
        """Kill the process group and wait until nothing of it is left."""
        if not self.ended():
            self.signal(signal.SIGKILL)
            self._process.wait()
            while not group_is_gone(self.group):
                time.sleep(0.01)
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1


class Vllm:
    """One engine; each `start` runs a new process."""

    def __init__(
        self, pod: Mapping[str, Any], address: str, directory: Path, imports_anew: bool
    ) -> None:
        self._pod = pod
        self._imports_anew = imports_anew
        self._directory = directory
        [container] = [c for c in pod["spec"]["containers"] if c["name"] == "engine"]
        self.container_document: dict[str, Any] = container
        """The engine's container in the pod's manifest; a change applies to the next start."""
        self.name = str(pod["metadata"]["name"])
        self.address = HostPort(address, container["ports"][0]["containerPort"])
        self.log = directory / f"{self.name}.log"
        self._process: Spawned | None = None

    def start(self) -> None:
        """Launch the process and return; `wait_ready` waits until it serves."""
        spec = self.container("engine")
        env = {"PATH": os.environ["PATH"], **spec.env, "USER": "tandem"}
        assert spec.command[:2] == ("vllm", "serve")
        arguments = ("--model", *spec.command[2:])
        command = server_command(*arguments, imports_anew=self._imports_anew)
        self._process = Spawned(command, env, self.log)

    def container(self, name: str) -> ContainerSpec:
        """A container of the pod, resolved with a new pod uid."""
        metadata = {**self._pod["metadata"], "uid": uuid.uuid4().hex}
        document = {**self._pod, "metadata": metadata}
        spec = parse_pod(document, address=self.address.host, volume=self._volume)
        return next(c for c in spec.all_containers if c.name == name)

    def wait_ready(self) -> None:
        """Wait until /health answers 200; on failure show the end of the log."""
        deadline = time.monotonic() + STARTS_WITHIN
        while not self.healthy():
            if self.process.ended() or time.monotonic() > deadline:
                raise AssertionError("\n".join([f"{self.name} did not start:", *tail(self.log)]))
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
        directory = self._directory / f"{self.name}-{name}"
        directory.mkdir(exist_ok=True)
        if "downwardAPI" in volume:
            write_files(self._pod, volume, directory)
        return directory


def make_pair(
    model: Path,
    directory: Path,
    *,
    adapters: Mapping[str, Path] | None = None,
    prefill_args: Sequence[str] = (),
    decode_args: Sequence[str] = (),
    imports_anew: bool = False,
    **transfer: Any,
) -> tuple[Vllm, Vllm]:
    """A prefill and a decode engine, not started; their logs go to `directory`.

    `adapters`: LoRA adapters that both engines load, name → directory. `prefill_args` and
    `decode_args`: additional arguments of one engine alone. `imports_anew`: see `server_command`.
    `transfer`: fields of spec.transfer.
    """
    prefill, decode = pods(_pools(model, adapters or {}, prefill_args, decode_args, transfer))
    listening = {
        pod["metadata"]["name"]: [
            port["containerPort"] for c in pod["spec"]["containers"] for port in c["ports"]
        ]
        for pod in (prefill, decode)
    }
    addresses = allocate(listening, seed=str(directory))
    first, second = (
        Vllm(pod, addresses[pod["metadata"]["name"]], directory, imports_anew)
        for pod in (prefill, decode)
    )
    return first, second


def _pools(
    model: Path,
    adapters: Mapping[str, Path],
    prefill_args: Sequence[str],
    decode_args: Sequence[str],
    transfer: Mapping[str, Any],
) -> Any:
    engine: dict[str, Any] = {
        "version": "0.32.0",
        "dtype": "float32",
        "blockSize": 32,
        "maxModelLen": 32768,
        "extraArgs": [
            "--enforce-eager",
            # A NIXL handshake lists every block: up to 30 s with the 32768 blocks of 1 GiB.
            "--num-gpu-blocks-override=2048",
            "--enable-scale-out",
            "--enable-auto-tool-choice",
            "--tool-call-parser=hermes",
        ],
        "env": [{"name": name, "value": value} for name, value in ON_A_CPU.items()],
    }
    source: dict[str, Any] = {"name": MODEL_NAME, "source": {"path": str(model)}}
    if adapters:
        source["loraAdapters"] = [{"name": n, "path": str(path)} for n, path in adapters.items()]
    prefill = {
        "model": source,
        "accelerator": {"count": 0},
        "engine": engine | {"extraArgs": [*engine["extraArgs"], *prefill_args]},
        "transfer": {"bufferDevice": "cpu", "leaseDuration": f"{LEASE:.0f}s", **transfer},
    }
    arguments = {"extraArgs": [*engine["extraArgs"], *decode_args], "env": engine["env"]}
    decode = {"accelerator": {"count": 0}, "replicas": 1, "engine": arguments}
    return pair(prefill, decode)[0]


def server_command(*arguments: str, imports_anew: bool = False) -> tuple[str, ...]:
    """The command of an engine. `imports_anew`: it takes half a minute to start, and may have other
    variables that are read at an import."""
    if imports_anew:
        return (str(VENV / "bin/python"), "-m", SERVER, *arguments)
    return forked(SERVER, *arguments)


def forked(module: str, *arguments: str) -> tuple[str, ...]:
    """`python -m MODULE ARGUMENT …` in the environment of vLLM, where vLLM and torch are imported
    already."""
    return (sys.executable, "-I", "-S", str(_PRELOADED), _preloaded(), module, *arguments)


@functools.cache
def _preloaded() -> str:
    """Start the process that forks engines, until this one ends. Returns the path of its socket."""
    directory = Path(tempfile.mkdtemp(prefix="vllm-"))
    path = str(directory / "socket")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        command = (str(VENV / "bin/python"), "-P", str(_PRELOADED), str(listener.fileno()))
        env = {"PATH": os.environ["PATH"], "USER": "tandem", **ON_A_CPU}
        inherited = (listener.fileno(),)
        process = Spawned((*command, *_MODULES), env, directory / "log", inherited)
    atexit.register(process.end)
    return path


def metric(page: str, name: str, **labels: str) -> float:
    """Sum of a metric's samples that have `labels`; 0 if there are none."""
    selectors = [f"{key}={json.dumps(value)}" for key, value in labels.items()]
    lines = (line for line in page.splitlines() if line.startswith((f"{name}{{", f"{name} ")))
    return sum(
        float(line.rpartition(" ")[2])
        for line in lines
        if all(selector in line for selector in selectors)
    )
