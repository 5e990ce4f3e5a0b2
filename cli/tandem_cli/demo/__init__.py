"""`tandem demo`: disaggregated serving on one machine; checks every answer against a single engine.

pools     the pools that it starts
load      the requests that it sends: conversations, or a trace
outcome   the result: figures, mismatches, exit status (pure)
run       the sequence: start, send, check, report
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from tandem_contract.commandline import fail
from tandem_contract.documents import DocumentError
from tandem_engine.types import EngineError
from tandem_loadtest.scrape import ScrapeError
from tandem_loadtest.workload.traces import TraceError
from tandem_local.errors import SetupError, StartFailed

from ..options import SEED, command, port_option, run_dir_option
from .run import Options, run

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@command("demo")
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Hugging Face directory of a Llama-family model.  [default: a tiny random one]",
)
@click.option(
    "--trace",
    type=_FILE,
    help="Replay this Mooncake JSONL or Azure CSV trace instead of the built-in conversations.",
)
@click.option(
    "--limit",
    type=click.IntRange(1),
    help="Send only the first LIMIT requests of the trace.  [default: all]",
)
@click.option("--seed", type=SEED, default=0, help="Seed of the workload and of the tiny model.")
@port_option
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Also write the figures to this file as JSON.",
)
@run_dir_option
def demo(**flags: Any) -> None:
    """Serve a model with prefill and decode on separate pods on this machine; check every answer.

    Runs one prefill pod, two decode pods, the endpoint picker and Envoy as processes. The exit
    status is 0 if every answer equals, token for token, the answer of a single engine, and 1 if one
    differs, a request failed, or the built-in workload missed a routing path.
    """
    options = Options(**flags)
    if options.limit is not None and options.trace is None:
        raise click.UsageError("--limit needs --trace: it counts requests of the trace")
    if options.json_file is not None and not options.json_file.absolute().parent.is_dir():
        raise click.UsageError(f"--json {options.json_file}: its directory does not exist")
    try:
        status = asyncio.run(run(options))
    except (DocumentError, TraceError, EngineError, SetupError) as err:
        fail(str(err), status=2)
    except (StartFailed, ScrapeError) as err:
        fail(str(err))
    except KeyboardInterrupt:
        fail("interrupted; all processes were stopped", status=130)
    sys.exit(status)
