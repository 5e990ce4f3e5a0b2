"""The command `tandem-engine`: vLLM's flags, checked before a model is loaded or a port is opened.

Exit status: 2 for a flag that cannot be used, 1 when the start fails (a port in use, a model that
does not load), 0 after SIGTERM or SIGINT.
"""

import errno
import logging
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import click
import uvloop

from tandem_contract.commandline import DURATION, command, fail
from tandem_contract.durations import format_duration

from .chat import ChatTemplate, ChatTemplateUnusable
from .config import EngineConfig
from .events import EventsUnusable
from .settings import Settings, settings_from
from .text import Tokenizer, TokenizerUnusable
from .types import ConfigError, EngineError

_TINY: Final = re.compile(r"tiny(?::(?P<seed>\d{1,18}))?", re.ASCII)
_POSITIVE: Final = click.IntRange(min=1)
_DEFAULTS: Final[dict[str, Any]] = {
    field.name: field.default for kind in (EngineConfig, Settings) for field in fields(kind)
}
"""Field name → default of the settings classes, where each default and its reason are written."""


# fmt: off
@command("tandem-engine")
@click.option("--model", type=click.Path(path_type=Path), required=True,
              help="Hugging Face directory: config.json, tokenizer.json, *.safetensors; or `tiny`,"
                   " `tiny:SEED`: a small model with random weights, made at start.")
@click.option("--served-model-name", multiple=True,
              help="Model name in the API, repeatable; the first is the metrics' model_name label."
                   " [default: --model]")
@click.option("--host", default=_DEFAULTS["host"], help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=_DEFAULTS["port"],
              help="Port to listen on; 0 takes a free one.")
@click.option("--dtype", default=_DEFAULTS["dtype"],
              help="Data type of weights and KV cache; auto: what config.json says.",
              type=click.Choice(["auto", "float64", "float32", "bfloat16", "float16"]))
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]),
              default=_DEFAULTS["device"], help="auto: CUDA when torch finds a GPU, else the CPU.")
@click.option("--block-size", type=_POSITIVE, default=_DEFAULTS["block_size"],
              help="Tokens per KV block.")
@click.option("--num-gpu-blocks-override", type=_POSITIVE,
              help="KV blocks of the cache; wins over --kv-cache-memory-bytes.")
@click.option("--kv-cache-memory-bytes", type=_POSITIVE,
              help="Size of the KV cache in bytes."
                   " [default: 1 GiB on CPU, 80 % of the free memory on CUDA]")
@click.option("--max-model-len", type=_POSITIVE,
              help="Most tokens of a prompt and its answer together."
                   " [default: the model's own limit]")
@click.option("--max-num-seqs", type=_POSITIVE, default=_DEFAULTS["max_num_seqs"],
              help="Most sequences in one step.")
@click.option("--max-num-batched-tokens", type=_POSITIVE,
              default=_DEFAULTS["max_num_batched_tokens"], help="Most tokens in one step.")
@click.option("--long-prefill-token-threshold", type=click.IntRange(min=0),
              default=_DEFAULTS["long_prefill_token_threshold"],
              help="Most tokens of one prompt in a step that has other requests to serve; 0: as"
                   " many as fit.")
@click.option("--kv-transfer-config", metavar="JSON",
              help="vLLM's KV transfer configuration: the engine's role in hand-offs.")
@click.option("--transfer-key-dir", type=click.Path(path_type=Path), metavar="DIR",
              help="Directory of the set's transfer keys, one a file: KV moves only between engines"
                   " with a key in common. Read again when it changes. [default: any engine]")
@click.option("--kv-storage-config", metavar="JSON",
              help="Where KV lies beyond the device: host memory and external storage"
                   " (docs/run/storage.md).")
@click.option("--kv-events-config", metavar="JSON",
              help="vLLM's KV events configuration: where KV cache events are published.")
@click.option("--seed", type=click.IntRange(min=0), default=_DEFAULTS["seed"],
              help="Seed of the random generator that requests without a seed draw from.")
@click.option("--enable-prefix-caching/--no-enable-prefix-caching", default=True,
              help="vLLM's flag; this engine always caches prefixes.")
@click.option("--shutdown-timeout", type=DURATION,
              default=format_duration(_DEFAULTS["shutdown_timeout"]),
              help="After SIGTERM: time for running requests to finish and held KV to be read.")
@click.option("--max-body-bytes", type=_POSITIVE, default=_DEFAULTS["body_limit"],
              help="Largest request body in bytes; a larger one is answered with 413.")
def main(**flags: Any) -> None:
    """Serve a Llama-family model with vLLM's API, flags and metric names.

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
def _model(model: Path) -> Iterator[Path]:
    """The model's directory; that of a `tiny` model is made here and removed at the end."""
    if (match := _TINY.fullmatch(str(model))) is None:
        yield model
        return
    # Importing torch takes seconds, which --help should not pay.
    from .tiny import make_tiny_model  # noqa: PLC0415

    with TemporaryDirectory(prefix="tandem-tiny-") as directory:
        make_tiny_model(Path(directory), seed=int(match["seed"] or 0))
        yield Path(directory)


def _run(flags: dict[str, Any]) -> None:
    try:
        settings = settings_from(flags)
        tokenizer = Tokenizer(settings.engine.model)
        template = ChatTemplate(settings.engine.model)
    except (ConfigError, EventsUnusable, TokenizerUnusable, ChatTemplateUnusable) as err:
        fail(str(err), status=2)
    # Held from here on: no other process can take the port while the model loads.
    listener = _bind(settings.host, settings.port)
    # Importing torch takes seconds, which --help and the failures above should not pay.
    from .process import run_engine  # noqa: PLC0415

    try:
        with listener:
            uvloop.run(run_engine(settings, tokenizer, template, listener))
    except ConfigError as err:
        # A side channel that cannot be bound is a fault of the machine (1), not of a flag (2).
        fail(str(err), status=1 if isinstance(err.__cause__, OSError) else 2)
    except EngineError as err:
        fail(str(err))


def _bind(host: str, port: int) -> socket.socket:
    """Bind a socket without listening, so that a port in use is found before the model loads."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as err:
        fail(f"--host {host}: {err.strerror}", status=2)
    sock = socket.socket(family, kind, protocol)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(address)
    except OSError as err:
        sock.close()
        is_taken = err.errno == errno.EADDRINUSE
        advice = (
            ": stop the process that listens there, or choose another --port" if is_taken else ""
        )
        fail(f"cannot listen on {host}:{port}: {(err.strerror or str(err)).lower()}{advice}")
    return sock


if __name__ == "__main__":
    main()
