"""Build the cluster's programs with Go, from modules of Go's module proxy.

Kubernetes' own repository is one module that finds its `k8s.io/<part>` siblings in `./staging`;
the proxy has each sibling as a separate module of version `v0.<minor>.<patch>`, so the build module
replaces every sibling by that version.
"""

import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from . import versions

HERE = Path(__file__).parent
_K8S = "k8s.io/kubernetes"
_CONTAINERD = "github.com/containerd/containerd/v2"
_CONTAINERD_COMMANDS = ("containerd", "containerd-shim-runc-v2", "ctr")
_K8S_VERSION = "k8s.io/component-base/version"


class BuildFailed(Exception):
    """A go command failed; the message holds the end of its output and the path of the log."""


@dataclass(frozen=True)
class Program:
    """One binary, or several built by one command.

    `module` is the folder of the build's go.mod below the cache. `prepare` creates that go.mod; it
    gets a `Go` that runs in the folder and is called only while the file does not exist.
    """

    name: str
    version: str
    module: str
    packages: tuple[str, ...]
    prepare: Callable[["Go"], None]
    ldflags: str = "-s -w"
    tags: str = ""
    version_flags: tuple[str, ...] = ("--version",)


@dataclass(frozen=True)
class Go:
    """Runs `go` in one build folder; stderr goes to a log."""

    binary: str
    folder: Path
    log: Path

    def __call__(self, *arguments: str) -> str:
        """Go's stdout. Raises BuildFailed."""
        environment = os.environ | {
            "GOFLAGS": "-mod=mod -buildvcs=false -trimpath",
            "CGO_ENABLED": "0",
            "GOWORK": "off",
        }
        with self.log.open("a") as log:
            done = subprocess.run(
                [self.binary, *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                check=False,
            )
        if done.returncode != 0:
            last = " / ".join(self.log.read_text().strip().splitlines()[-3:])
            raise BuildFailed(f"go {arguments[0]} failed: {last} (log: {self.log})")
        return done.stdout


def build(go: str, program: Program, cache: Path) -> None:
    """Build `program` into `cache/bin`. Raises BuildFailed."""
    folder, staging = cache / "build" / program.module, cache / "bin" / f".new-{os.getpid()}"
    for directory in (folder, staging, cache / "log"):
        directory.mkdir(parents=True, exist_ok=True)
    log = cache / "log" / f"build-{program.name}.log"
    log.write_text("")
    run = Go(go, folder, log)
    if not (folder / "go.mod").exists():
        try:
            program.prepare(run)
        except BuildFailed:
            (folder / "go.mod").unlink(missing_ok=True)
            raise
    tags = ["-tags", program.tags] if program.tags else []
    out = staging / program.name if len(program.packages) == 1 else f"{staging}/"
    run("build", *tags, "-ldflags", program.ldflags, "-o", str(out), *program.packages)
    # Renamed only when complete: an interrupted build leaves no partial program in bin.
    for binary in staging.iterdir():
        binary.replace(cache / "bin" / binary.name)
    staging.rmdir()


def _kubernetes_module(go: Go) -> None:
    version = versions.KUBERNETES
    go("mod", "init", "k8sbuild")
    go("mod", "edit", "-require", f"{_K8S}@v{version}")
    module = json.loads(go("mod", "download", "-json", f"{_K8S}@v{version}"))
    declared = Path(module["GoMod"]).read_text()
    for part in re.findall(r"^\s*(k8s\.io/[a-z-]+) => \./staging", declared, re.MULTILINE):
        go("mod", "edit", "-replace", f"{part}={part}@v0.{version.removeprefix('1.')}")


def _containerd_module(go: Go) -> None:
    go("mod", "init", "ctdbuild")
    packages = [f"{_CONTAINERD}/cmd/{command}" for command in _CONTAINERD_COMMANDS]
    go("get", "-tool", *(f"{package}@v{versions.CONTAINERD}" for package in packages))


def _coredns_module(go: Go) -> None:
    (go.folder / "main.go").write_text((HERE / "src/coredns.go").read_text())
    go("mod", "init", "corednsbuild")
    go("get", f"github.com/coredns/coredns@v{versions.COREDNS}")


def _pause_module(go: Go) -> None:
    (go.folder / "main.go").write_text((HERE / "src/pause.go").read_text())
    go("mod", "init", "pause")


def _conformance_module(go: Go) -> None:
    source = HERE / "src/gateway_conformance.go"
    (go.folder / "main.go").write_text(source.read_text())
    go("mod", "init", CONFORMANCE)
    go("get", f"{_CONFORMANCE}@v{versions.INFERENCE_EXTENSION}")
    go("get", f"{_ECHO}@v{versions.GATEWAY_API}")


def _tool_module(package: str, version: str) -> Callable[[Go], None]:
    def prepare(go: Go) -> None:
        go("mod", "init", "toolbuild")
        go("get", "-tool", f"{package}@v{version}")

    return prepare


def _kubernetes(name: str) -> Program:
    _, minor, _ = versions.KUBERNETES.split(".")
    stamps = {"gitVersion": f"v{versions.KUBERNETES}", "gitMajor": "1", "gitMinor": minor}
    return Program(
        name,
        versions.KUBERNETES,
        f"k8s-{versions.KUBERNETES}",
        (f"{_K8S}/cmd/{name}",),
        _kubernetes_module,
        " ".join(["-s -w", *(f"-X {_K8S_VERSION}.{k}={v}" for k, v in stamps.items())]),
        version_flags=("version", "--client") if name == "kubectl" else ("--version",),
    )


_KUBERNETES_PROGRAMS = (
    *("kube-apiserver", "kube-controller-manager", "kube-scheduler"),
    *("kubelet", "kube-proxy", "kubectl"),
)
_HELM = "helm.sh/helm/v3"
_KUBE_ROUTER = "github.com/cloudnativelabs/kube-router/v2"
_TOXIPROXY = "github.com/Shopify/toxiproxy/v2"
_VERSITYGW = "github.com/versity/versitygw"
_H2SPEC = "github.com/summerwind/h2spec"
_ISTIO = "istio.io/istio"
_ENVOY_GATEWAY = "github.com/envoyproxy/gateway"
_CONFORMANCE = "sigs.k8s.io/gateway-api-inference-extension/conformance"
_ECHO = "sigs.k8s.io/gateway-api/conformance/echo-basic"
CONFORMANCE = "gateway-conformance"
"""The program of the conformance suite; it brings `ECHO`."""
ECHO = "echo-basic"
"""The servers of the suite's pods."""
PROGRAMS = {name: _kubernetes(name) for name in _KUBERNETES_PROGRAMS} | {
    program.name: program
    for program in (
        Program(
            "containerd",
            versions.CONTAINERD,
            f"containerd-{versions.CONTAINERD}",
            tuple(
                f"{_CONTAINERD}/cmd/{x}" for x in ("containerd", "containerd-shim-runc-v2", "ctr")
            ),
            _containerd_module,
            f"-s -w -X {_CONTAINERD}/version.Version=v{versions.CONTAINERD}",
            # Leave out storage drivers and a plugin protocol: unused, or in need of C headers.
            tags="no_btrfs no_devmapper no_zfs no_nri",
        ),
        Program(
            "coredns",
            versions.COREDNS,
            f"coredns-{versions.COREDNS}",
            (".",),
            _coredns_module,
            version_flags=("-version",),
        ),
        Program("pause", "1", "pause", (".",), _pause_module, version_flags=()),
        Program(
            "helm",
            versions.HELM,
            f"helm-{versions.HELM}",
            (f"{_HELM}/cmd/helm",),
            _tool_module(f"{_HELM}/cmd/helm", versions.HELM),
            f"-s -w -X {_HELM}/internal/version.version=v{versions.HELM}",
            version_flags=("version", "--short"),
        ),
        Program(
            "kwok",
            versions.KWOK,
            f"kwok-{versions.KWOK}",
            ("sigs.k8s.io/kwok/cmd/kwok",),
            _tool_module("sigs.k8s.io/kwok/cmd/kwok", versions.KWOK),
            f"-s -w -X sigs.k8s.io/kwok/pkg/consts.Version=v{versions.KWOK}",
        ),
        # Enforces NetworkPolicies.
        Program(
            "kube-router",
            versions.KUBE_ROUTER,
            f"kube-router-{versions.KUBE_ROUTER}",
            (f"{_KUBE_ROUTER}/cmd/kube-router",),
            _tool_module(f"{_KUBE_ROUTER}/cmd/kube-router", versions.KUBE_ROUTER),
            f"-s -w -X {_KUBE_ROUTER}/pkg/version.Version={versions.KUBE_ROUTER}",
        ),
        Program(
            "toxiproxy",
            versions.TOXIPROXY,
            f"toxiproxy-{versions.TOXIPROXY}",
            (f"{_TOXIPROXY}/cmd/server",),
            _tool_module(f"{_TOXIPROXY}/cmd/server", versions.TOXIPROXY),
            f"-s -w -X {_TOXIPROXY}.Version={versions.TOXIPROXY}",
            version_flags=("-version",),
        ),
        # An S3 server over a directory.
        Program(
            "versitygw",
            versions.VERSITYGW,
            f"versitygw-{versions.VERSITYGW}",
            (f"{_VERSITYGW}/cmd/versitygw",),
            _tool_module(f"{_VERSITYGW}/cmd/versitygw", versions.VERSITYGW),
            f"-s -w -X main.Version={versions.VERSITYGW}",
        ),
        Program(
            "h2spec",
            versions.H2SPEC,
            f"h2spec-{versions.H2SPEC}",
            (f"{_H2SPEC}/cmd/h2spec",),
            # Older than modules' rule that major versions stand in the path.
            _tool_module(f"{_H2SPEC}/cmd/h2spec", f"{versions.H2SPEC}+incompatible"),
            f"-s -w -X main.VERSION={versions.H2SPEC}",
        ),
        # Istio's control plane, istiod.
        Program(
            "pilot-discovery",
            versions.ISTIO,
            f"istio-{versions.ISTIO}",
            (f"{_ISTIO}/pilot/cmd/pilot-discovery",),
            _tool_module(f"{_ISTIO}/pilot/cmd/pilot-discovery", versions.ISTIO),
            f"-s -w -X {_ISTIO}/pkg/version.buildVersion={versions.ISTIO}",
            version_flags=("version",),
        ),
        Program(
            "envoy-gateway",
            versions.ENVOY_GATEWAY,
            f"envoy-gateway-{versions.ENVOY_GATEWAY}",
            (f"{_ENVOY_GATEWAY}/cmd/envoy-gateway",),
            _tool_module(f"{_ENVOY_GATEWAY}/cmd/envoy-gateway", versions.ENVOY_GATEWAY),
            f"-s -w -X {_ENVOY_GATEWAY}/internal/cmd/version.envoyGatewayVersion="
            f"v{versions.ENVOY_GATEWAY}",
            version_flags=("version",),
        ),
        Program(
            CONFORMANCE,
            versions.INFERENCE_EXTENSION,
            f"{CONFORMANCE}-{versions.INFERENCE_EXTENSION}",
            (".", _ECHO),
            _conformance_module,
            f"-s -w -X main.version={versions.INFERENCE_EXTENSION}",
            version_flags=("version",),
        ),
    )
}
