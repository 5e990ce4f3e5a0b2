"""LMCache between engines: what both sides must agree on, and whether KV is found. Pure.

    is_alone(engine)           whether no NIXL moves the KV
    check_hits(engine)         what a decode engine found in LMCache
    hash_seed, chunk_size      with different ones, the sides look for KV under different keys

No answer tells whether KV was found: an engine that finds none computes the prompt.
"""

from collections.abc import Iterator
from typing import Final

from tandem_contract import metrics

from .facts import Engine
from .findings import Finding, Severity

_IN_PROCESS: Final = "LMCacheConnectorV1"
_CHECK: Final = "LMCache hits"
_MIN_TOKENS: Final = 10_000
"""Tokens that must have been looked up to judge that none is found: prompts below one chunk are
never stored, and of a first prompt the prefill may be late."""


def is_alone(engine: Engine) -> bool:
    """Whether KV moves through LMCache, and not by NIXL."""
    command = engine.command
    return command is not None and command.uses("LMCache") and not command.uses("Nixl")


def check_hits(engine: Engine) -> Iterator[Finding]:
    """Whether a decode engine has found KV. Prompts that were not split are looked up, too."""
    looked_up = engine.counters.get(metrics.ENGINE_EXTERNAL_QUERIES, 0.0)
    hits = engine.counters.get(metrics.ENGINE_EXTERNAL_HITS, 0.0)
    detail = f"{hits:.0f} of {looked_up:.0f} prompt tokens were found in LMCache"
    if hits:
        yield Finding(Severity.OK, _CHECK, engine.pod, detail)
    elif looked_up < _MIN_TOKENS:
        fix = "send more prompts that are long enough to be split, then run tandem doctor again"
        yield Finding(Severity.UNKNOWN, _CHECK, engine.pod, detail, fix)
    else:
        fix = (
            "let both pools use one store (lmcache.remote_url), or with lmcache-mp one server or a "
            "common L2 tier; read LMCache's lines in the logs of both engines"
        )
        yield Finding(Severity.WARNING, _CHECK, engine.pod, detail, fix)


def hash_seed(engine: Engine) -> str | None:
    """The seed of LMCacheConnectorV1's hashes; None where there are none."""
    if engine.command is None or not engine.command.uses(_IN_PROCESS):
        return None
    return engine.command.environment.get("PYTHONHASHSEED", "none")


def chunk_size(engine: Engine) -> str | None:
    """Tokens of a chunk of LMCacheConnectorV1; with lmcache-mp the server has the size."""
    if engine.command is None or not engine.command.uses(_IN_PROCESS):
        return None
    extra = engine.command.settings(_IN_PROCESS)
    size = extra.get("lmcache.chunk_size") or engine.command.environment.get("LMCACHE_CHUNK_SIZE")
    return str(size or "default")
