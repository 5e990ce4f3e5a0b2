"""Find the programs that the tests' Kubernetes is made of; build or install missing ones.

Places, in order: `$KUBEBUILDER_ASSETS` (set by the user), the cache
`${TANDEM_CLUSTER_CACHE:-~/.cache/tandem/cluster}/bin` if the version there is the pinned one, and
PATH (etcd, kubectl, promtool, chromium, Go, gcc and ip only).

`path` and `missing` only look; pytest calls nothing else. `ensure` builds with Go, and takes etcd,
promtool and chromium from Debian; `make cluster-tools` calls it. When several processes call
`ensure` at the same time, one builds and the others wait for it.
"""

import fcntl
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from . import gateway_crds, gobuild, versions
from .gobuild import Program

Say = Callable[[str], None]

CONTROL_PLANE = ("etcd", "kubectl", "kube-apiserver", "kube-controller-manager")
NODE = (
    *CONTROL_PLANE,
    *("kube-scheduler", "kubelet", "kube-proxy", "containerd", "coredns", "pause", "helm"),
)
GATEWAY_CRDS = "gateway-crds"
"""No program, but files that are downloaded with Go: see `gateway_crds`."""
MAKE_TEST = (
    *CONTROL_PLANE,
    *(
        "helm",
        "promtool",
        "chromium",
        "h2spec",
        "versitygw",
        "toxiproxy",
        GATEWAY_CRDS,
        "pilot-discovery",
    ),
)
"""What `make test` uses beyond the Python environment."""
NODE_GATEWAYS = (gobuild.CONFORMANCE, GATEWAY_CRDS, "pilot-discovery", "envoy-gateway")
"""What tests of gateways on the node need beside the node."""
NODE_POLICIES = ("kube-router",)
"""What tests of NetworkPolicies on the node need beside the node."""
ALL = (*gobuild.PROGRAMS, "etcd", "promtool", "chromium", GATEWAY_CRDS)
# A file of each Debian package, and the package.
NODE_PACKAGES = {
    "/usr/sbin/runc": "runc",
    "/usr/sbin/iptables": "iptables",
    "/usr/sbin/ipset": "ipset",
    "/usr/sbin/nft": "nftables",
    "/usr/sbin/conntrack": "conntrack",
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "/sbin/ip": "iproute2",
    "/bin/busybox": "busybox-static",
    "/usr/bin/nsenter": "util-linux",
}
INSTALLED = ("go", "gcc", "ip")
"""What tests use of the machine; nothing here installs it."""
_FROM_PATH = ("etcd", "kubectl", "promtool", "chromium", *INSTALLED)
ETCD_PACKAGES = {"/usr/bin/etcd": "etcd-server"}
_CHROMIUM_PACKAGES = {"/usr/bin/chromium": "chromium"}


class MissingTool(Exception):
    """A program is not installed and cannot be built or installed; the message says what to do."""


def cache() -> Path:
    directory = os.environ.get("TANDEM_CLUSTER_CACHE")
    return Path(directory) if directory else Path.home() / ".cache/tandem/cluster"


def path(name: str) -> Path:
    """The executable of program `name`, in any version. Raises MissingTool."""
    executable = _executable(name)
    if executable is None:
        raise MissingTool(f"{name} is not built: run `make cluster-tools`")
    return executable


def missing(names: Sequence[str]) -> list[str]:
    """Those of `names` that are not installed, or are in the cache in another version."""
    return [name for name in names if not _is_available(name)]


def ensure(names: Sequence[str], say: Say) -> None:
    """Build or install each of `names` that is missing.

    Raises MissingTool after trying them all; its message names every program that failed.
    """
    if not missing(names):
        return
    failures = []
    with _cache_lock(say):
        for name in missing(names):
            try:
                _provide(name, say)
            except MissingTool as failure:
                failures.append(str(failure))
    if failures:
        raise MissingTool("; ".join(failures))


def ensure_packages(packages: dict[str, str], say: Say) -> None:
    """Install the Debian packages of which `packages` names a file that does not exist.

    Raises MissingTool.
    """
    absent = [package for file, package in packages.items() if not Path(file).exists()]
    if not absent:
        return
    listed = " ".join(absent)
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise MissingTool(f"not installed: {listed}; as root on Debian: apt-get install {listed}")
    say(f"installing {listed}")
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *absent]
    for command in (["apt-get", "update", "-qq"], install):
        done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            raise MissingTool(f"{' '.join(command)}: {done.stderr.strip().splitlines()[-1:]}")


def _places(name: str) -> Iterator[Path]:
    """Paths at which `name` may be, in the order of preference."""
    if assets := os.environ.get("KUBEBUILDER_ASSETS"):
        yield Path(assets, name)
    yield cache() / "bin" / name
    if name in _FROM_PATH and (installed := shutil.which(name)):
        yield Path(installed)
    if name == "promtool":
        yield _unpacked_prometheus() / "usr/bin/promtool"


def _executable(name: str) -> Path | None:
    return next((place for place in _places(name) if os.access(place, os.X_OK)), None)


def _is_available(name: str) -> bool:
    """Whether `path` finds `name`; a program in our cache must also have the pinned version."""
    if name == GATEWAY_CRDS:
        return gateway_crds.are_complete(cache())
    executable = _executable(name)
    if executable is None or executable.parent != cache() / "bin":
        return executable is not None
    return _has_version(executable, gobuild.PROGRAMS[name])


def _has_version(binary: Path, program: Program) -> bool:
    if not program.version_flags:
        return True
    output = subprocess.run(
        [binary, *program.version_flags],
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return program.version in output.stdout


def _provide(name: str, say: Say) -> None:
    if name == "etcd":
        ensure_packages(ETCD_PACKAGES, say)
        return
    if name == "chromium":
        ensure_packages(_CHROMIUM_PACKAGES, say)
        return
    if name == "promtool":
        _unpack_promtool(say)
        return
    go = shutil.which("go")
    if go is None:
        raise MissingTool(f"no {name}, and no Go to build it: install Go 1.26 or newer (go.dev/dl)")
    try:
        _build(go, name, say)
    except gobuild.BuildFailed as failed:
        raise MissingTool(str(failed)) from failed


def _build(go: str, name: str, say: Say) -> None:
    """Raises gobuild.BuildFailed."""
    if name == GATEWAY_CRDS:
        say("downloading the CustomResourceDefinitions of gateways as Go modules")
        gateway_crds.download(go, cache())
        return
    program = gobuild.PROGRAMS[name]
    say(f"building {name} {program.version} with Go; this takes minutes, once …")
    started = time.monotonic()
    with _still(say, f"still building {name}"):
        gobuild.build(go, program, cache())
    say(f"built {name} in {time.monotonic() - started:.0f} s")


@contextmanager
def _still(say: Say, line: str) -> Iterator[None]:
    """Say `line` each minute."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(60.0):
            say(line)

    thread = threading.Thread(target=repeat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def kubectl_warning() -> str | None:
    """What to say of a kubectl that is not of the cluster's minor version, or one beside it."""
    kubectl = path("kubectl")
    shown = subprocess.run(
        [kubectl, "version", "--client"], check=False, capture_output=True, text=True
    )
    found = re.search(r"v(\d+\.\d+)\.", shown.stdout)
    minor = versions.KUBERNETES.rpartition(".")[0]
    if found is None or found[1] == minor:
        return None
    return (
        f"warning: {kubectl} has version {found[1]}, the cluster {minor}: take it out of PATH and"
        " run `make cluster-tools`, which builds one of the cluster's version"
    )


def _unpacked_prometheus() -> Path:
    return cache() / "prometheus"


def _unpack_promtool(say: Say) -> None:
    """Unpack Debian's prometheus package into the cache; installing it would start its service."""
    say("downloading Debian's prometheus package for promtool")
    folder = _unpacked_prometheus()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        download = ["apt-get", "download", "-qq", "prometheus"]
        subprocess.run(download, cwd=folder, check=True, capture_output=True)
        (package,) = folder.glob("prometheus_*.deb")
        subprocess.run(["dpkg-deb", "-x", package, folder], check=True, capture_output=True)
    except (OSError, ValueError, subprocess.CalledProcessError) as err:
        raise MissingTool("no promtool: on Debian, apt-get install prometheus") from err


@contextmanager
def _cache_lock(say: Say) -> Iterator[None]:
    """Hold the cache's lock, so that concurrent processes build each program once."""
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another process is building the cluster's programs: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
