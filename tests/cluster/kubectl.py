"""Run kubectl against a test cluster."""

import os
import subprocess
from pathlib import Path

from . import tools


class Failed(Exception):
    """kubectl's exit status was not 0; `stderr` and the message hold its error output."""

    def __init__(self, arguments: tuple[str, ...], stderr: str) -> None:
        self.stderr = stderr
        super().__init__(f"kubectl {' '.join(arguments)}: {stderr.strip()}")


def run(kubeconfig: Path, *arguments: str, input: str | None = None) -> str:
    """Run kubectl with `input` on stdin and return its stdout. Raises Failed."""
    # kubectl caches API discovery in HOME by host and port. Tests reuse ports, so each kubeconfig
    # gets a cache of its own.
    environment = os.environ | {
        "KUBECONFIG": str(kubeconfig),
        "KUBECACHEDIR": f"{kubeconfig}.cache",
    }
    done = subprocess.run(
        [tools.path("kubectl"), *arguments],
        input=input or "",
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode != 0:
        raise Failed(arguments, done.stderr)
    return done.stdout
