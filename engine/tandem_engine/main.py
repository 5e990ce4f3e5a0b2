"""`tandem-engine`: vLLM's flags, checked before anything is loaded or opened.

Exit status: 2 for a flag that cannot be used, 1 for a machine that is not ready (a port in use,
a model that does not load), 0 after a signal.
"""

import errno
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click
import uvloop

from tandem_contract import ports
from tandem_contract.commandline import DURATION, command, fail

from .chat import ChatTemplate, ChatTemplateUnusable
from .config import ConfigError
from .events import EventsUnusable
from .server import DEFAULT_BODY_LIMIT
from .settings import settings_from
from .text import Tokenizer, TokenizerUnusable
from .types import EngineError

_TINY: Final = re.compile(r"tiny(?::(?P<seed>\d{1,18}))?", re.ASCII)
_POSITIVE: Final = click.IntRange(min=1)


# fmt: off
@command("tandem-engine")
@click.option("--model", type=click.Path(path_type=Path), required=True,
              help="Hugging Face directory: config.json, tokenizer.json, *.safetensors; or `tiny`,"
                   " `tiny:SEED`: a small model with random weights, made at start.")
@click.option("--served-model-name", multiple=True,
              help="Name in the API, repeatable; the first labels metrics. [default: --model]")
@click.option("--host", default="0.0.0.0", help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=ports.ENGINE_PREFILL,
              help="Port to listen on; 0 takes a free one.")
@click.option("--dtype", default="auto", help="Of weights and KV cache.",
              type=click.Choice(["auto", "float64", "float32", "bfloat16", "float16"]))
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto",
              help="auto: CUDA when there is one.")
@click.option("--block-size", type=_POSITIVE, default=16, help="Tokens per KV block.")
@click.option("--num-gpu-blocks-override", type=_POSITIVE, help="KV blocks in all.")
@click.option("--kv-cache-memory-bytes", type=_POSITIVE,
              help="KV cache in bytes. [default: 1 GiB on CPU, 80 % of the free memory on CUDA]")
@click.option("--max-model-len", type=_POSITIVE,
              help="Prompt and answer together, in tokens. [default: the model's own limit]")
@click.option("--max-num-seqs", type=_POSITIVE, default=64, help="Sequences in one step.")
@click.option("--max-num-batched-tokens", type=_POSITIVE, default=2048, help="Tokens in one step.")
@click.option("--kv-transfer-config", metavar="JSON", help="The engine's part in hand-offs.")
@click.option("--kv-events-config", metavar="JSON", help="Where KV cache events are published.")
@click.option("--seed", type=click.IntRange(min=0), default=0, help="Of requests without a seed.")
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True,
              help="vLLM's flag; this engine always caches.")
@click.option("--shutdown-timeout", type=DURATION, default="30s",
              help="After SIGTERM, how long requests may run on and finished prompts' KV be read.")
@click.option("--max-body-bytes", type=_POSITIVE, default=DEFAULT_BODY_LIMIT,
              help="Larger request bodies are refused.")
def main(**flags: Any) -> None:
    """Serve a Llama-family model under vLLM's names.

    The address other engines read KV from is VLLM_NIXL_SIDE_CHANNEL_HOST and
    VLLM_NIXL_SIDE_CHANNEL_PORT in the environment, as for vLLM.
    """
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    with _model(flags["model"]) as directory:
        names = flags["served_model_name"] or (str(flags["model"]),)
        _run({**flags, "model": directory, "served_model_name": names})


@contextmanager
def _model(named: Path) -> Iterator[Path]:
    """The model's directory; a tiny one lives as long as the process."""
    if (match := _TINY.fullmatch(str(named))) is None:
        yield named
        return
    # Torch takes seconds to import: --help does without.
    from .tiny import make_tiny_model  # noqa: PLC0415

    with TemporaryDirectory(prefix="tandem-tiny-") as made:
        make_tiny_model(Path(made), seed=int(match["seed"] or 0))
        yield Path(made)


def _run(flags: dict[str, Any]) -> None:
    try:
        settings = settings_from(flags)
        tokenizer = Tokenizer(settings.engine.model)
        template = ChatTemplate(settings.engine.model)
    except (ConfigError, EventsUnusable, TokenizerUnusable, ChatTemplateUnusable) as err:
        fail(str(err), status=2)
    listener = _bound(settings.host, settings.port)
    # Torch takes seconds to import: --help and whatever fails above do without.
    from .process import run_engine  # noqa: PLC0415

    try:
        with listener:
            uvloop.run(run_engine(settings, tokenizer, template, listener))
    except ConfigError as err:
        # A side channel that cannot be bound is the machine's fault, not the flag's.
        fail(str(err), status=1 if isinstance(err.__cause__, OSError) else 2)
    except EngineError as err:
        fail(str(err))


def _bound(host: str, port: int) -> socket.socket:
    """The socket, bound but not listening: a port in use is known before the model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as err:
        fail(f"--host {host}: {err.strerror}", status=2)
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind(address)
    except OSError as err:
        made.close()
        busy = err.errno == errno.EADDRINUSE
        advice = ": stop what listens there, or choose another --port" if busy else ""
        fail(f"cannot listen on {host}:{port}: {(err.strerror or str(err)).lower()}{advice}")
    return made


if __name__ == "__main__":
    main()
