"""One engine process from start to stop: event publisher, engine, HTTP server; stopped in reverse.

Importing this module imports torch, which takes seconds.

Errors: `PortTaken`, and those that the engine and the event publisher raise at their start.
"""

import asyncio
import logging
import signal
import socket
from typing import Final

from tandem_contract.commandline import HostPort
from tandem_contract.connections import raise_descriptor_limit
from tandem_contract.held_bytes import HeldBytes
from tandem_contract.memory_limit import default_held_bytes

from .chat import ChatTemplate
from .engine import Engine
from .events import KvEventPublisher
from .metrics import EngineMetrics
from .served_model import ServedModel
from .server import EngineServer
from .settings import Settings
from .text import Tokenizer
from .types import EngineError

_LOG: Final = logging.getLogger(__name__)
_BACKLOG: Final = 1024
"""Connections that the kernel queues until they are accepted."""


class PortTaken(EngineError):
    """Another process listens on the engine's port."""


async def run_engine(
    settings: Settings, tokenizer: Tokenizer, template: ChatTemplate, listener: socket.socket
) -> None:
    """Load the model, serve until SIGTERM or SIGINT, drain and stop.

    Raises EngineError when the start fails.
    """
    raise_descriptor_limit()
    # Before the model is loaded: an endpoint in use fails at once.
    publisher = None
    if settings.events is not None and settings.events.is_active:
        publisher = KvEventPublisher(settings.events, host=settings.host)
        publisher.start()
    metrics = EngineMetrics(settings.names[0], publisher.publish if publisher else None)
    try:
        engine = Engine(settings.engine, metrics)
        await engine.start()
        # Not before: while the model loads there is nothing to drain, and SIGTERM ends the process.
        stop = asyncio.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        try:
            blocks, size = engine.stats().num_blocks, settings.engine.block_size
            # Only now: the gauges read the scheduler, which `start` creates.
            metrics.watch(engine.stats, block_size=size, num_blocks=blocks)
            model = _served_model(settings, engine, tokenizer, template)
            transfer = settings.engine.kv_transfer
            server = EngineServer(
                engine,
                model,
                metrics,
                body_limit=settings.body_limit,
                held=HeldBytes(default_held_bytes(settings.body_limit)),
                reads_streams=transfer is not None and transfer.role.consumes,
            )
            description = f"{', '.join(model.names)}, {blocks} KV blocks of {size} tokens"
            await _serve_http(server, listener, stop, description, settings.shutdown_timeout)
        finally:
            # Also when the server fails to start: the engine owns threads and sockets.
            await engine.stop()
    finally:
        if publisher is not None:
            await publisher.stop()


def _served_model(
    settings: Settings, engine: Engine, tokenizer: Tokenizer, template: ChatTemplate
) -> ServedModel:
    return ServedModel(
        names=settings.names,
        root=str(settings.engine.model),
        max_model_len=engine.limits.max_model_len,
        vocab_size=engine.limits.vocab_size,
        tokenizer=tokenizer,
        template=template,
    )


async def _serve_http(
    server: EngineServer,
    listener: socket.socket,
    stop: asyncio.Event,
    description: str,
    shutdown_timeout: float,
) -> None:
    """Listen until `stop` is set, then drain for at most `shutdown_timeout` seconds.

    Raises PortTaken.
    """
    connections = server.connections()
    await connections.runner.setup()
    try:
        address = HostPort(*listener.getsockname()[:2])
        loop = asyncio.get_running_loop()
        try:
            listening = await loop.create_server(connections, sock=listener, backlog=_BACKLOG)
        except OSError as err:
            # SO_REUSEADDR lets two processes bind the port at once; only one of them may listen.
            raise PortTaken(f"cannot listen on {address}: {err.strerror}") from err
        _LOG.info("ready: http://%s serves %s", address, description)
        await stop.wait()
        _LOG.info("stopping: running requests and KV reads have %.0f s to finish", shutdown_timeout)
        # Closes the listening socket first, so that no connection comes in during the drain.
        listening.close()
        if not await server.drain(shutdown_timeout):
            _LOG.warning("shutdown timeout: running requests are aborted, unread KV is freed")
    finally:
        # After the drain, which needs the open connections to write the last answers.
        await connections.runner.cleanup()
