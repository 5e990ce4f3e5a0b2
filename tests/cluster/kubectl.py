"""Run kubectl against a test cluster."""

import os
import subprocess
from pathlib import Path

from . import tools


class Failed(Exception):
    """kubectl ended with a code other than 0; `stderr` and the message hold what it said."""

    def __init__(self, arguments: tuple[str, ...], stderr: str) -> None:
        self.stderr = stderr
        super().__init__(f"kubectl {' '.join(arguments)}: {stderr.strip()}")


def run(kubeconfig: Path, *arguments: str, input: str | None = None) -> str:
    """What it prints, given `input` on stdin. Raises Failed."""
    # Its discovery cache lies in HOME and knows clusters by host and port, which are reused.
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
