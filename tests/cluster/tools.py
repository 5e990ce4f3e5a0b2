"""Find the programs a cluster is made of; build or install what is missing.

A program is taken from, in this order: `$KUBEBUILDER_ASSETS` (control plane only), the cache
`${TANDEM_CLUSTER_CACHE:-~/.cache/tandem/cluster}/bin` when its version is the pinned one, and for
etcd and kubectl the PATH. What is then missing is built with Go, or for etcd installed from
Debian by root. Several processes may ask at once: one builds, the others wait for it.
"""

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import gobuild
from .gobuild import Program

Say = Callable[[str], None]

CONTROL_PLANE = ("etcd", "kubectl", "kube-apiserver", "kube-controller-manager")
NODE = (
    *CONTROL_PLANE,
    *("kube-scheduler", "kubelet", "kube-proxy", "containerd", "coredns", "pause", "helm"),
)
# A command that tells whether each Debian package is there, and the package.
NODE_PACKAGES = {
    "/usr/sbin/runc": "runc",
    "/usr/sbin/iptables": "iptables",
    "/usr/sbin/nft": "nftables",
    "/usr/sbin/conntrack": "conntrack",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/sbin/ip": "iproute2",
    "/bin/busybox": "busybox-static",
    "/usr/bin/nsenter": "util-linux",
}
ETCD_PACKAGES = {"/usr/bin/etcd": "etcd-server"}


class MissingTool(Exception):
    """A program is not there and cannot be had here; the message says what to do."""


def cache() -> Path:
    chosen = os.environ.get("TANDEM_CLUSTER_CACHE")
    return Path(chosen) if chosen else Path.home() / ".cache/tandem/cluster"


def path(name: str) -> Path:
    """Where the program `name` is. Raises MissingTool."""
    found = next((place for place in _places(name) if os.access(place, os.X_OK)), None)
    if found is None:
        raise MissingTool(f"{name} is not built: run `make cluster-tools`")
    return found


def ensure(names: Sequence[str], say: Say) -> None:
    """Make `path(name)` work for each of `names`. Raises MissingTool."""
    if all(_is_there(name) for name in names):
        return
    with _alone(say):
        for name in names:
            if not _is_there(name):
                _provide(name, say)


def ensure_packages(packages: dict[str, str], say: Say) -> None:
    """Install the Debian packages whose file is not there. Raises MissingTool."""
    wanted = [package for probe, package in packages.items() if not Path(probe).exists()]
    if not wanted:
        return
    listed = " ".join(wanted)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise MissingTool(f"not installed: {listed}; as root on Debian: apt-get install {listed}")
    say(f"installing {listed}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *wanted]
    for command in (["apt-get", "update", "-qq"], install):
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise MissingTool(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")


def _places(name: str) -> Iterator[Path]:
    """Where `name` may lie, best first."""
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        yield Path(assets, name)
    yield cache() / "bin" / name
    if name in ("etcd", "kubectl") and (installed := shutil.which(name)):
        yield Path(installed)


def _is_there(name: str) -> bool:
    """Whether `path` finds it, in the pinned version where it is one of ours."""
    found = next((place for place in _places(name) if os.access(place, os.X_OK)), None)
    if found is None or found.parent != cache() / "bin":
        return found is not None
    return _has_version(found, gobuild.PROGRAMS[name])


def _has_version(binary: Path, program: Program) -> bool:
    if not program.asks_version:
        return True
    asked = subprocess.run(
        [binary, *program.asks_version], check=False, capture_output=True, text=True
    )
    return program.version in asked.stdout


def _provide(name: str, say: Say) -> None:
    if name == "etcd":
        ensure_packages(ETCD_PACKAGES, say)
        return
    go = shutil.which("go")
    if go is None:
        raise MissingTool(f"no {name}, and no Go to build it: install Go 1.26 or newer (go.dev/dl)")
    program = gobuild.PROGRAMS[name]
    say(f"building {name} {program.version} (once, some minutes) …")
    began = time.monotonic()
    try:
        gobuild.build(go, program, cache())
    except gobuild.BuildFailed as failed:
        raise MissingTool(str(failed)) from failed
    say(f"built {name} in {time.monotonic() - began:.0f} s")


@contextmanager
def _alone(say: Say) -> Iterator[None]:
    """Hold the cache's lock, so that a program is built once."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the cluster's programs: waiting for it")
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
