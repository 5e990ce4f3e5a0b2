"""`python -m tests.fuzz`: fuzz the targets, two at a time, and say what was found."""

import re
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from .targets import TARGETS

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]
_WORK = _ROOT / "build/fuzz"
"""The inputs that libFuzzer found to reach new code, kept between runs."""
_HOUR = 3600
_LIMITS = ("-max_len=4096", "-rss_limit_mb=2048", "-timeout=60", "-report_slow_units=30")
_EXECUTIONS = re.compile(r"^#(\d+)\s+(?:DONE|pulse|NEW|REDUCE|RELOAD).*?\bcov: (\d+)", re.MULTILINE)


class _Result(NamedTuple):
    target: str
    executions: int
    coverage: int
    """Branches reached."""
    failure: str
    """The end of the output of a process that found something; empty: it found nothing."""


def main() -> int:
    arguments = _arguments()
    targets = arguments.targets or list(TARGETS)
    seconds = arguments.seconds or _HOUR * arguments.jobs // max(arguments.jobs, len(targets))
    with ThreadPoolExecutor(arguments.jobs) as pool:
        results = list(pool.map(lambda target: _fuzz(target, seconds), targets))
    for result in results:
        state = "FAILED" if result.failure else "nothing found"
        figures = f"{result.executions} executions, {result.coverage} branches"
        print(f"{result.target}: {state}; {figures}, {seconds} s")
        if result.failure:
            print(result.failure)
    return int(any(result.failure for result in results))


def _arguments() -> Namespace:
    parser = ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", choices=[*TARGETS, []])
    parser.add_argument("--seconds", type=int, help="of each target; default: an hour in all")
    parser.add_argument("--jobs", type=int, default=2, help="targets that run at once")
    return parser.parse_args()


def _fuzz(target: str, seconds: int) -> _Result:
    work, seeds = _WORK / target, _HERE / "corpus" / target
    work.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "tests.fuzz.process", target, *_LIMITS]
    command += [f"-max_total_time={seconds}", f"-artifact_prefix={seeds}/", str(work), str(seeds)]
    done = subprocess.run(
        command, cwd=_ROOT, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    output = done.stdout.decode("utf-8", "replace")
    counts = _EXECUTIONS.findall(output)
    executions, coverage = map(int, counts[-1]) if counts else (0, 0)
    return _Result(target, executions, coverage, output[-4000:] if done.returncode else "")


if __name__ == "__main__":
    sys.exit(main())
