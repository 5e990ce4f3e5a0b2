"""What this machine gives a container: its command, its environment, its GPUs.

An image is not pulled. Ours (`tandem`, `tandem-engine`, under any registry and tag) run from the
Python environment this process runs from; another image's container needs an explicit command
that is on PATH, or that `programs` finds elsewhere. The environment of this process is passed on
but for `TANDEM_*`, which would override the flags that the Pod left at their defaults.
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

from .errors import Refused
from .podspec import ContainerSpec, PodSpec

ENTRYPOINTS: Final = {"tandem": "tandem", "tandem-engine": "tandem-engine"}
"""Our images and what they run when a container names no command."""

GPU: Final = "nvidia.com/gpu"
_VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
_ENGINE: Final = "tandem-engine"


def image_name(image: str) -> str:
    """`registry.example/a/tandem-engine:1.2@sha256:…` → `tandem-engine`."""
    return re.split(r"[:@]", image.rpartition("/")[2])[0]


class Machine:
    """Gives containers what they need, each GPU once."""

    def __init__(
        self,
        environ: Mapping[str, str],
        gpus: tuple[str, ...],
        programs: Mapping[str, Path] | None = None,
    ) -> None:
        """`gpus`: ids as CUDA_VISIBLE_DEVICES wants them; `programs`: name → the file to run."""
        self._programs = dict(programs or {})
        self._environ = {k: v for k, v in environ.items() if not k.startswith("TANDEM_")}
        own = str(Path(sys.executable).parent)
        self._environ["PATH"] = os.pathsep.join((own, environ.get("PATH", os.defpath)))
        self._gpus = gpus
        self._next_gpu: Iterator[str] = iter(gpus)
        self._taken: dict[str, list[str]] = {}

    @classmethod
    def here(cls, programs: Mapping[str, Path] | None = None) -> "Machine":
        """The machine this runs on."""
        visible = os.environ.get(_VISIBLE)
        if visible is not None:
            return cls(os.environ, tuple(filter(None, visible.split(","))), programs)
        found = (re.fullmatch(r"nvidia(\d+)", path.name) for path in Path("/dev").glob("nvidia*"))
        return cls(os.environ, tuple(sorted(match[1] for match in found if match)), programs)

    def prepare(self, pod: PodSpec, spec: ContainerSpec) -> tuple[ContainerSpec, dict[str, str]]:
        """The container with its command found, and its whole environment. Raises Refused."""
        where = f"pod {pod.name}: container {spec.name}"
        env = {**self._environ, **self._defaults(spec), **spec.env}
        if _VISIBLE not in spec.env:
            env[_VISIBLE] = ",".join(self._take_gpus(where, spec))
        return replace(spec, command=self._command(where, spec, env)), env

    def _defaults(self, spec: ContainerSpec) -> dict[str, str]:
        defaults = {}
        # A pod's HOME is its own and goes with the run; models are downloaded once.
        if home := self._environ.get("HOME"):
            defaults["HF_HOME"] = self._environ.get("HF_HOME", f"{home}/.cache/huggingface")
        # Several engines share the cores: one thread each is faster than all threads for each.
        if image_name(spec.image) == _ENGINE and "OMP_NUM_THREADS" not in self._environ:
            defaults["OMP_NUM_THREADS"] = "1"
        return defaults

    def _command(self, where: str, spec: ContainerSpec, env: Mapping[str, str]) -> tuple[str, ...]:
        command = spec.command
        if not spec.has_command:
            entrypoint = ENTRYPOINTS.get(image_name(spec.image))
            if entrypoint is None:
                raise Refused(
                    f"{where}: image {spec.image} cannot be run as a process: "
                    "give the container a command that is installed here"
                )
            command = (entrypoint, *command)
        program = str(self._programs.get(command[0], command[0]))
        found = shutil.which(program, path=env["PATH"])
        if found is None:
            raise Refused(
                f"{where}: {program} (image {spec.image}) is not on PATH: install it here, "
                f"or say where it is: --program {command[0]}=FILE"
            )
        return (found, *command[1:])

    def _take_gpus(self, where: str, spec: ContainerSpec) -> list[str]:
        for resource, count in spec.resources.items():
            if resource != GPU and count > 0:
                raise Refused(f"{where}: asks for {resource}: the local runner cannot give it")
        wanted = spec.resources.get(GPU, 0)
        # A pod that is replaced gets the GPUs it had.
        taken = self._taken.get(where) or list(islice(self._next_gpu, wanted))
        if len(taken) < wanted:
            raise Refused(
                f"{where}: asks for {wanted} {GPU} and this machine has {len(self._gpus)} in all: "
                "ask for 0 (accelerator.count: 0) to run on the CPU, or for fewer replicas"
            )
        self._taken[where] = taken
        return taken
