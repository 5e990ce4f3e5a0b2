"""A router that signs plans for sidecars, as the front of an endpoint does, without a cluster.

    python -m benchmarks.planning_router FILE KEY_DIRECTORY HOST:PORT

FILE lists the sidecars as backends.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import uvloop

from tandem_contract.commandline import HostPort, parse_host_port
from tandem_contract.memory import collect_seldom
from tandem_router.configuration import load
from tandem_router.main import epp_settings
from tandem_router.run import run
from tandem_sidecar.observability import logs
from tandem_sidecar.observability.logs import LogFormat
from tandem_sidecar.settings import Settings


def main() -> None:
    """Serve until a signal."""
    file, keys, listen = Path(sys.argv[1]), Path(sys.argv[2]), parse_host_port(sys.argv[3])
    settings = Settings(listen=listen, admin=HostPort(listen.host, 0), log_format=LogFormat.JSON)
    logs.configure(settings.log_format, settings.log_level)
    collect_seldom()
    epp = replace(epp_settings(file, settings, warm_up=False), plan_key_dir=keys)
    uvloop.run(run(settings, epp, file, load(file, os.environ)))


if __name__ == "__main__":
    main()
