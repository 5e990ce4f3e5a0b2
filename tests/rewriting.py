"""Makes of the tests' assertions what pytest makes of them, on all cores.

pytest rewrites each file when it is first imported and keeps the result beside the bytecode. In a
fresh checkout this takes longer than to import the files, and the process that collects the tests
would do it alone.
"""

import sys
from importlib.util import cache_from_source
from multiprocessing import get_context
from pathlib import Path

import pytest
from _pytest.assertion import rewrite

TESTS = Path(__file__).parent


def rewrite_all(config: pytest.Config) -> None:
    """Rewrite the files whose result is missing or stale, on as many processes as the run has
    workers; without workers, and where no bytecode is written, do nothing."""
    count = config.getoption("--workers")
    if count < 1 or sys.platform != "linux" or sys.dont_write_bytecode:
        return
    stale = [file for file in sorted(TESTS.rglob("test_*.py")) if _is_stale(file)]
    processes = [
        get_context("fork").Process(target=_rewrite, args=(config, stale[number::count]))
        for number in range(min(count, len(stale)))
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _is_stale(file: Path) -> bool:
    return rewrite._read_pyc(file, _cache(file)) is None


def _cache(file: Path) -> Path:
    return Path(cache_from_source(file)).parent / (file.stem + rewrite.PYC_TAIL)


def _rewrite(config: pytest.Config, files: list[Path]) -> None:
    for file in files:
        cache = _cache(file)
        cache.parent.mkdir(parents=True, exist_ok=True)
        source_hash, code = rewrite._rewrite_test(file, config)
        rewrite._write_pyc(config.stash[rewrite.assertstate_key], code, source_hash, cache)
