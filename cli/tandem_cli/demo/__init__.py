"""`tandem demo`: the main job on one machine, every answer checked against one engine alone.

pools     what is brought up
load      what is sent: conversations, or a trace
outcome   what it came to: figures, mismatches, exit status (pure)
run       the order of things
"""

import asyncio
import sys
from pathlib import Path
from typing import Any

import click

from tandem_contract import ports
from tandem_contract.commandline import fail
from tandem_contract.documents import DocumentError
from tandem_engine.types import EngineError
from tandem_loadtest.scrape import ScrapeError
from tandem_loadtest.traces import TraceError
from tandem_local.errors import SetupError, StartFailed

from ..options import SEED, command, run_dir_option
from .run import Options, run

_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


@command("demo")
@click.option(
    "--model",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="Hugging Face directory of a Llama-family model.  [default: a tiny random one]",
)
@click.option("--trace", type=_FILE, help="Replay a Mooncake JSONL or Azure CSV trace instead.")
@click.option(
    "--limit", type=click.IntRange(1), help="First so many requests of the trace.  [default: all]"
)
@click.option("--seed", type=SEED, default=0, help="Of the workload and of the tiny model.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=ports.ENVOY,
    help="Port of 127.0.0.1 to serve on; 0 takes a free one.",
)
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False, writable=True),
    help="Write the figures here.",
)
@run_dir_option
def demo(**flags: Any) -> None:
    """Serve a model with prefill and decode apart, on this machine, and check every answer.

    One prefill pod, two decode pods, the endpoint picker and Envoy run as processes. The exit
    status is 0 when every answer equals one engine alone, token for token, and 1 when one differs,
    a request failed, or the built-in workload missed a routing path.
    """
    options = Options(**flags)
    if options.limit is not None and options.trace is None:
        raise click.UsageError("--limit counts requests of a --trace: give both")
    if options.json_file is not None and not options.json_file.absolute().parent.is_dir():
        raise click.UsageError(f"--json {options.json_file}: its directory does not exist")
    try:
        status = asyncio.run(run(options))
    except (DocumentError, TraceError, EngineError, SetupError) as err:
        fail(str(err), status=2)
    except (StartFailed, ScrapeError) as err:
        fail(str(err))
    except KeyboardInterrupt:
        fail("interrupted; nothing is left running", status=130)
    sys.exit(status)
