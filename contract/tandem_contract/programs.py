"""The programs of this distribution, from their first instruction: SIGTERM ends them at once.

In a container a program is the first process, and the kernel drops SIGTERM for a first process that
has no handler. Importing a program takes up to seconds. So the handler comes before the imports;
a server replaces it by its own as soon as there is something to drain.
"""

import os
import signal
from functools import partial
from importlib import import_module
from typing import Final

TERMINATED: Final = 128 + signal.SIGTERM
"""Exit status of a command that SIGTERM ended before its work was done, as in shells."""


def end_at_sigterm(status: int) -> None:
    """Exit with `status` at SIGTERM, until another handler is set."""
    # Not SystemExit: an import or a callback may swallow an exception.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(status))


def _run(module: str, status: int = 0) -> None:
    end_at_sigterm(status)
    import_module(module).main()


command = partial(_run, "tandem_cli.main", TERMINATED)
engine = partial(_run, "tandem_engine.main")
epp = partial(_run, "tandem_epp.main")
operator = partial(_run, "tandem_operator.main")
router = partial(_run, "tandem_router.main")
sidecar = partial(_run, "tandem_sidecar.main")
