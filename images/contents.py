"""The files of each layer, by path in the image.

    python        interpreter, standard library, system libraries, users
    dependencies  requirements/runtime.lock, installed by uv
    engine        packages that only requirements/engine.lock has; torch without its GPU parts
    project       the wheel of the checkout, EPP and sidecar compiled in parts, and its commands
    vllm-storage  vLLM's storage connector with its libraries, and `cp`, which copies them

Every `.py` is compiled here because a container's root may be read-only. The `.pyc` files do not
check the source's modification time, which layers do not keep.
"""

import configparser
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

from .closure import elf_files, libraries
from .oci import Content, Directory, Files, Link, Text
from .stub import empty_library

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
STANDARD = f"/usr/local/lib/{PYTHON}"
SITE = f"{STANDARD}/site-packages"
COMMANDS = "/usr/local/bin"
"""Folder of the project's commands."""
UID = 65532
PACKAGES = "/packages"
"""What the image tandem-vllm-storage copies into the engine's pod."""
VLLM_PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Those that vLLM supports. A library compiled for one of them has its version in the file's name,
so that all stand side by side."""

_NOT_OF_PYTHON = frozenset(
    (
        *("__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib"),
        *("turtledemo", "tkinter", "lib2to3", "ensurepip", "pydoc_data"),
    )
)
# Libraries that the CUDA build of torch is linked with but calls only on a GPU: 1.6 GB.
_NEVER_CALLED = frozenset(
    (
        *("libcublas", "libcublasLt", "libcufft", "libcusparse", "libcusparseLt"),
        *("libnccl", "libnvrtc"),
    )
)
_PASSWD = f"root:x:0:0::/:/sbin/nologin\ntandem:x:{UID}:{UID}::/tmp:/sbin/nologin\n"
_GROUP = f"root:x:0:\ntandem:x:{UID}:\n"
# By default Python loads extensions with RTLD_NOW, which fails on functions that a stub lacks.
# RTLD_LAZY looks up a function at its first call.
_BIND_ON_FIRST_CALL = """\
import os
import sys

sys.setdlopenflags(os.RTLD_LAZY)
"""
_CONNECTOR = (
    "contract/tandem_contract",
    "kvstore/tandem_kvstore",
    "vllm_storage/tandem_vllm_storage",
)
_COMMAND = """\
#!/usr/local/bin/python3
import sys
from {module} import {function}
sys.exit({function}())
"""


class BuildFailed(Exception):
    """A build command failed; the message holds the end of its output."""


def python_files(stage: Path) -> Files:
    """This interpreter and the system libraries it needs. `stage` is an empty folder."""
    source = Path(sysconfig.get_path("stdlib"))
    copied = stage / PYTHON
    shutil.copytree(source, copied, symlinks=True, ignore=_ignoring(_NOT_OF_PYTHON))
    _compile(copied, STANDARD)
    executable = Path(sys.executable).resolve()
    files: dict[str, Content] = {
        "/etc/passwd": Text(_PASSWD.encode()),
        "/etc/group": Text(_GROUP.encode()),
        "/etc/nsswitch.conf": Text(b"hosts: files dns\n"),
        "/tmp": Directory(0o1777),  # noqa: S108 - the image's own
        f"/usr/local/bin/{PYTHON}": executable,
        "/usr/local/bin/python3": Link(PYTHON),
        **_below(copied, STANDARD),
        **_system_libraries([executable, *elf_files(copied)], stage),
    }
    return files


def dependency_files(stage: Path, lock: Path, uv: Path) -> Files:
    """The packages of `lock`, installed into `stage`. Raises BuildFailed."""
    _install(stage, lock, uv)
    _compile(stage, SITE)
    return _below(stage, SITE) | _system_libraries(elf_files(stage), stage)


def engine_files(
    stage: Path, lock: Path, uv: Path, *, below: Collection[str], whole: bool
) -> Files:
    """Files of `lock`'s packages that are not in `below`, the paths of lower layers.

    Unless `whole`, Triton is left out, which only compiles for GPUs, and so are NVIDIA's libraries
    that torch is not linked with. `import torch` fails without those it is linked with: the small
    ones are kept, the large ones replaced by stubs. Raises BuildFailed.
    """
    _install(stage, lock, uv)
    if not whole:
        _drop_what_a_cpu_never_loads(stage)
        (stage / "sitecustomize.py").write_text(_BIND_ON_FIRST_CALL)
    _compile(stage, SITE)
    files = _below(stage, SITE) | _system_libraries(elf_files(stage), stage)
    return {path: content for path, content in files.items() if path not in below}


def project_files(stage: Path, root: Path, compiled: Path | None = None) -> Files:
    """The wheel of the checkout `root`, and each of its commands. `compiled`: a folder with
    extension modules for it. Raises BuildFailed."""
    wheels, unpacked = stage / "wheel", stage / "unpacked"
    _run([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels)], root)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(unpacked)
    if compiled is not None:
        for module in compiled.rglob("*.so"):
            shutil.copy(module, unpacked / module.relative_to(compiled))
    _compile(unpacked, SITE)
    commands = {
        f"{COMMANDS}/{name}": Text(
            _COMMAND.format(module=module, function=function).encode(), 0o755
        )
        for name, module, function in _commands(unpacked)
    }
    return _below(unpacked, SITE) | commands


def storage_files(stage: Path, root: Path, lock: Path, uv: Path) -> Files:
    """What images/tandem-vllm-storage.Dockerfile has: the packages of the checkout `root`, the
    libraries of `lock` for each Python of vLLM, and the program that copies them. Raises
    BuildFailed."""
    program = shutil.which("cp")
    if program is None:
        raise BuildFailed("no program cp on PATH, which copies the packages: install coreutils")
    copy = Path(program).resolve()
    files: dict[str, Content] = {
        **_system_libraries([copy], stage),
        "/usr/bin/cp": copy,
        "/etc/passwd": Text(_PASSWD.encode()),
        "/etc/group": Text(_GROUP.encode()),
    }
    for python in VLLM_PYTHONS:
        _install(stage / python, lock, uv, "--python-version", python)
        files |= _below(stage / python, PACKAGES)
    for package in _CONNECTOR:
        copied = stage / package
        shutil.copytree(root / package, copied, ignore=shutil.ignore_patterns("__pycache__"))
        files |= _below(copied, f"{PACKAGES}/{copied.name}")
    return files


def _commands(site: Path) -> Iterator[tuple[str, str, str]]:
    declared = configparser.ConfigParser()
    (entry_points,) = site.glob("*.dist-info/entry_points.txt")
    declared.read(entry_points)
    for name, target in declared["console_scripts"].items():
        module, _, function = target.partition(":")
        yield name, module, function


def _drop_what_a_cpu_never_loads(site: Path) -> None:
    torch = site / "torch"
    imported = [*torch.glob("_C.*.so"), torch / "lib/libtorch_global_deps.so"]
    linked = {path.resolve() for path in (*imported, *libraries(imported).values())}
    for path in [*(site / "nvidia").rglob("*"), *(torch / "lib").glob("*")]:
        if not path.is_file():
            continue
        if path.resolve() not in linked:
            path.unlink()
        elif path.name.partition(".")[0] in _NEVER_CALLED:
            hollow = empty_library(path.name, like=path)
            path.unlink()
            path.write_bytes(hollow)
    for name in ("triton", "cuda", "torch/include", "torch/share"):
        shutil.rmtree(site / name, ignore_errors=True)


def _install(stage: Path, lock: Path, uv: Path, *options: str) -> None:
    _run(
        [
            *(str(uv), "pip", "install", "--quiet", "--require-hashes", "--no-deps"),
            # Hard links into uv's cache are fast, and safe because files are only read or unlinked.
            *("--link-mode", "hardlink"),
            *options,
            *("--python", sys.executable, "--target", str(stage), "--requirement", str(lock)),
        ]
    )


def _compile(folder: Path, installed: str) -> None:
    _run(
        [
            *(sys.executable, "-m", "compileall", "-q", "-j", "0"),
            *("--invalidation-mode", "unchecked-hash"),
            *("-s", str(folder), "-p", installed, str(folder)),
        ],
        # Some packages contain files for other Python versions; they fail to compile, unused.
        lenient=True,
    )


def _below(folder: Path, installed: str) -> dict[str, Content]:
    files: dict[str, Content] = {}
    for path in sorted(folder.rglob("*")):
        at = f"{installed}/{path.relative_to(folder)}"
        if path.is_symlink():
            files[at] = Link(str(path.readlink()))
        elif path.is_file() and path.suffix != ".a":
            files[at] = path
    return files


def _system_libraries(binaries: Iterable[Path], stage: Path) -> dict[str, Content]:
    files: dict[str, Content] = {}
    for name, path in libraries(binaries).items():
        if not path.is_relative_to(stage.resolve()):
            files[name] = path
    return files


def _ignoring(names: Collection[str]) -> Callable[[str, list[str]], list[str]]:
    def ignored(folder: str, entries: list[str]) -> list[str]:
        return [entry for entry in entries if entry in names or entry.startswith("config-")]

    return ignored


def _run(command: list[str], folder: Path | None = None, *, lenient: bool = False) -> None:
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if process.returncode != 0 and not lenient:
        last = "\n".join((process.stderr or process.stdout).strip().splitlines()[-5:])
        raise BuildFailed(f"{' '.join(command[:4])}: {last}")
