"""One engine process from start to stop: events, engine, HTTP, and the same backwards.

Importing this imports torch.

Errors: `PortTaken`, beside what the engine and the event publisher raise at their start.
"""

import asyncio
import logging
import signal
import socket
from typing import Final

from aiohttp import web

from tandem_contract.commandline import HostPort

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


class PortTaken(EngineError):
    """Somebody else listens there."""


async def run_engine(
    settings: Settings, tokenizer: Tokenizer, template: ChatTemplate, listener: socket.socket
) -> None:
    """Load, serve until a signal, stop in order. Raises EngineError when the start fails."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    publisher = None
    if settings.events is not None and settings.events.active:
        publisher = KvEventPublisher(settings.events, host=settings.host)
        publisher.start()
    metrics = EngineMetrics(settings.names[0], publisher.publish if publisher else None)
    try:
        engine = Engine(settings.engine, metrics)
        await engine.start()
        try:
            blocks, size = engine.stats().num_blocks, settings.engine.block_size
            metrics.watch(engine.stats, block_size=size, num_blocks=blocks)
            model = _served(settings, engine, tokenizer, template)
            server = EngineServer(engine, model, metrics, body_limit=settings.body_limit)
            about = f"{', '.join(model.names)}, {blocks} KV blocks of {size} tokens"
            await _answer(server, listener, stop, about, settings.shutdown_timeout)
        finally:
            await engine.stop()
    finally:
        if publisher is not None:
            await publisher.stop()


def _served(
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


async def _answer(
    server: EngineServer,
    listener: socket.socket,
    stop: asyncio.Event,
    about: str,
    shutdown_timeout: float,
) -> None:
    """Listen until `stop`, then let requests finish and their KV be read. Raises PortTaken."""
    runner = server.runner()
    await runner.setup()
    try:
        site = web.SockSite(runner, listener)
        address = HostPort(*listener.getsockname()[:2])
        try:
            await site.start()
        except OSError as err:
            # Another process bound it at the same moment, and was first to listen.
            raise PortTaken(f"cannot listen on {address}: {err.strerror}") from err
        _LOG.info("ready: http://%s serves %s", address, about)
        await stop.wait()
        _LOG.info("stopping: running requests and KV reads have %.0f s", shutdown_timeout)
        await site.stop()
        if not await server.drain(shutdown_timeout):
            _LOG.warning("time is up: requests still running end with an error, KV is left unread")
    finally:
        await runner.cleanup()
