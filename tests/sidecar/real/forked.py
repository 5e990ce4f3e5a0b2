"""Engines as forks of one process that has imported torch, so that they start at once."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Final

_FORKS: Final[ForkServerContext] = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tandem_engine.main", "tandem_engine.process"])


def engine(
    arguments: list[str],
    environment: dict[str, str],
    log: Path,
    prepare: Callable[[], None] | None = None,
) -> multiprocessing.process.BaseProcess:
    """`tandem-engine` with `arguments` as a process, in which `prepare` is called first."""
    process = _FORKS.Process(
        target=_run, args=(arguments, environment, str(log), prepare), daemon=True
    )
    process.start()
    return process


def _run(
    arguments: list[str],
    environment: dict[str, str],
    log: str,
    prepare: Callable[[], None] | None,
) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (sys.stdout, sys.stderr):
        os.dup2(output, stream.fileno())
    os.environ.update(environment)
    import torch

    from tandem_engine.main import main

    torch.set_num_threads(1)
    if prepare is not None:
        prepare()
    main(arguments)
