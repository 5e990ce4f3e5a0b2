"""Run kubectl against a test cluster."""

import os
import subprocess
import time
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


def wait_until_established(kubeconfig: Path, *definitions: str) -> None:
    """Wait until the API server serves the kinds of CustomResourceDefinitions.

    `definitions` select them, as arguments of kubectl. Raises Failed after a minute.
    """
    deadline = time.monotonic() + 60
    while True:
        try:
            wait = ("wait", "--for=condition=Established", "--timeout=60s")
            run(kubeconfig, *wait, *definitions)
            return
        except Failed as err:
            # Generated definitions have `conditions: null` until the API server sets them, and
            # kubectl fails on that instead of waiting.
            if "accessor error" not in err.stderr or time.monotonic() > deadline:
                raise
