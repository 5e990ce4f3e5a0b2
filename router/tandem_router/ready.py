"""The line that tells that a router serves, for people and for the program that started it."""

import sys

from tandem_contract.commandline import HostPort
from tandem_epp.process.configuration import Configuration


def print_ready(
    listen: HostPort, admin: HostPort, configuration: Configuration, workers: int
) -> None:
    """Print it; the addresses have the ports that were bound."""
    processes = f", {workers} workers" if workers > 1 else ""
    # A file without any leaves them to the cluster, whose pods are not known yet.
    listed = len(configuration.router.backends) or "a cluster's"
    print(  # noqa: T201 - the readiness line
        f"tandem-router: serving on {listen}, admin on {admin}, {listed} backends{processes}",
        file=sys.stderr,
        flush=True,
    )
