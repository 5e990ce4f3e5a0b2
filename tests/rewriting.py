"""Lets the workers of a parallel run share what pytest makes of the tests' assertions.

pytest rewrites each file when it is first imported and keeps the result beside the bytecode.
Workers import the same files at the same time, so that each would rewrite all of them, which takes
longer than to import them. `write_share` lets each worker write a part of the files first.
"""

import os
import sys
from importlib.util import cache_from_source
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

TESTS = Path(__file__).parent


def write_share(config: pytest.Config) -> None:
    """Rewrite this worker's part of the files whose result is missing or stale; outside a worker of
    pytest-xdist, and where no bytecode is written, do nothing."""
    worker = os.environ.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker or sys.dont_write_bytecode:
        return
    files = sorted(TESTS.rglob("test_*.py"))
    for file in files[int(worker) :: int(os.environ["PYTEST_XDIST_WORKER_COUNT"])]:
        folder = Path(cache_from_source(file)).parent
        cache = folder / (file.stem + rewrite.PYC_TAIL)
        if rewrite._read_pyc(file, cache) is None:
            folder.mkdir(parents=True, exist_ok=True)
            source_hash, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, cache)
