"""`tandem bench` while the site changes: streams whose answers are compared with one engine's."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tandem_loadtest.figures.files import load_report
from tandem_loadtest.records import Outcome
from tandem_local.ports import free_port

from .client import MODEL
from .site import SECONDS, until

CLIENTS = 6
_TOKENS = 150
_HOST = "127.0.0.1"


@dataclass
class Benched:
    """What became of the streams; empty until the end of the block."""

    outcomes: Counter[str] = field(default_factory=Counter)
    """Without those that the end of the load cut off."""

    @property
    def failures(self) -> set[str]:
        """How the streams ended that do not have the reference's answer."""
        return {*self.outcomes} - {Outcome.OK}


@contextmanager
def benched(address: str, folder: Path) -> Iterator[Benched]:
    """Clients stream from `host:port` in this block, one request after another; after it their
    answers are compared with those of an engine of the same model on this machine. `folder` is
    created."""
    folder.mkdir()
    result = Benched()
    with ExitStack() as stack:
        reference = free_port(_HOST)
        engine = ("tandem-engine", "--model", "tiny", "--served-model-name", MODEL)
        _start(stack, *engine, "--host", _HOST, "--port", str(reference), log=folder / "engine.log")
        begun, report = folder / "begun", folder / "report.json"
        bench = _start(
            stack,
            *("tandem", "bench", f"http://{address}", "--model", MODEL, "--endpoint", "chat"),
            *("--concurrency", str(CLIENTS), "--duration", "1h", "--workload", "fixed"),
            *("--prompt-tokens", "300", "--output-tokens", str(_TOKENS), "--wait", f"{SECONDS}s"),
            *("--reference", f"http://{_HOST}:{reference}", "--at", "0s", f"touch {begun}"),
            *("--json", str(report)),
            log=folder / "bench.log",
        )
        until(begun.exists, "the first request of tandem bench")
        yield result
        assert bench.poll() is None, (folder / "bench.log").read_text()
        bench.send_signal(signal.SIGINT)
        bench.wait(SECONDS)
    [repeat] = load_report(report).repeats
    result.outcomes.update(repeat.all.outcomes)
    del result.outcomes["unsent"]
    print(f"tandem bench: {dict(result.outcomes)}", *repeat.failures, sep="\n")


def _start(stack: ExitStack, program: str, *flags: str, log: Path) -> "subprocess.Popen[bytes]":
    """A program of this environment, which ends with the block."""
    output = stack.enter_context(log.open("wb"))
    command = [Path(sys.executable).with_name(program), *flags]
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    stack.enter_context(process)
    stack.callback(process.kill)
    return process
