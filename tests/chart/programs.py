"""Run helm and promtool on the chart."""

import json
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.cluster import tools

CHART = Path(__file__).parents[2] / "charts/tandem"
RELEASE = "tandem"
NAMESPACE = "tandem-system"
KUBERNETES = "1.36"
MONITORING = "monitoring.coreos.com/v1"


class Refused(Exception):
    """The program's exit status was not 0; the message is its output."""


def run(*command: str | Path, kubeconfig: Path | None = None) -> str:
    """Run `command` and return its stdout. Raises Refused."""
    with tempfile.TemporaryDirectory() as home:
        # helm keeps caches and registry credentials in HOME: tests must not use the user's.
        environment = {"HOME": home, "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
        if kubeconfig is not None:
            environment["KUBECONFIG"] = str(kubeconfig)
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        raise Refused(done.stdout + done.stderr)
    return done.stdout


def helm(*arguments: str | Path, kubeconfig: Path | None = None) -> str:
    """Run helm. Raises Refused, and MissingTool if helm is not built."""
    return run(tools.path("helm"), *arguments, kubeconfig=kubeconfig)


def template(*arguments: str | Path, apis: Sequence[str] = (), namespace: str = NAMESPACE) -> str:
    """The chart's manifests as YAML. Raises Refused."""
    flags = [f"--api-versions={api}" for api in apis]
    return helm(
        *("template", RELEASE, CHART, f"--namespace={namespace}", f"--kube-version={KUBERNETES}"),
        *flags,
        *arguments,
    )


def objects(*arguments: str | Path, apis: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The chart's manifests. Raises Refused."""
    return [each for each in documents(template(*arguments, apis=apis)) if each]


def documents(text: str) -> list[Any]:
    """What a text of YAML has, read by libyaml: Python needs half a second for the manifests."""
    return list(yaml.load_all(text, yaml.CSafeLoader))


def kinds(manifests: Sequence[dict[str, Any]]) -> set[str]:
    return {manifest["kind"] for manifest in manifests}


def promtool(*arguments: str | Path) -> str:
    """Run promtool. Raises Refused, and MissingTool if promtool is not installed."""
    return run(tools.path("promtool"), *arguments)


def dashboard() -> dict[str, Any]:
    """The Grafana dashboard."""
    loaded: dict[str, Any] = json.loads((CHART / "files/dashboards/tandem.json").read_text())
    return loaded


RULES = CHART / "files/rules/tandem.yaml"


def rules() -> list[dict[str, Any]]:
    """Every recording and alerting rule."""
    [content] = documents(RULES.read_text())
    return [rule for group in content["groups"] for rule in group["rules"]]
