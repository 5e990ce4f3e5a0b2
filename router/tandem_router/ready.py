"""The line that tells that a router serves, for people and for the program that started it."""

import sys

from tandem_contract.commandline import HostPort
from tandem_epp.process.configuration import Configuration


def print_ready(
    listen: HostPort, admin: HostPort, configuration: Configuration, workers: int
) -> None:
    """Print it; the addresses have the ports that were bound."""
    processes = f", {workers} workers" if workers > 1 else ""
    print(  # noqa: T201 - the readiness line
        f"tandem-router: serving on {listen}, admin on {admin},"
        f" {len(configuration.router.backends)} backends{processes}",
        file=sys.stderr,
        flush=True,
    )
