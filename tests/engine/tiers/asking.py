"""Requests whose prompt is stored in a directory: six chunks of it, and a few tokens more."""

from pathlib import Path

from tandem_engine.engine import Engine, Generation
from tandem_engine.tiers.settings import KvStorageConfig
from tandem_engine.types import Request

from ..engines import GREEDY, expected, finish

CHUNK, CHUNKS, LENGTH = 32, 6, 200


def storage(directory: Path, **settings: int) -> KvStorageConfig:
    """Storage in a directory."""
    return KvStorageConfig(endpoint=f"file://{directory}", chunk_tokens=CHUNK, **settings)


def submit(engine: Engine, tokens: tuple[int, ...], name: str = "a", count: int = 8) -> Generation:
    """Send one request."""
    return engine.submit(Request(name, tokens, GREEDY(max_tokens=count)))


async def ask(engine: Engine, tokens: tuple[int, ...], name: str = "a") -> None:
    """Send one request, and compare its answer with the dense reference."""
    answer, _ = await finish(submit(engine, tokens, name))
    assert answer == expected(tokens, 8)
