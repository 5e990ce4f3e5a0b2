"""External storage in a pool: settings that its engine refuses or ignores, found before it starts.

storage_problems(spec, has_handoff=…)    -> what vLLM's connector refuses at the start, with the fix
bounds_problems(spec)                    -> bounds that no engine would keep, with the fix
chunk_problems(spec)                     -> chunks that no engine would take, with the fix
setting_problems(spec)                   -> settings that the engine does not know, with the nearest
"""

from collections.abc import Iterator
from typing import Final

from tandem_contract.connectors import ConnectorName
from tandem_contract.vllm_storage import (
    BOUNDS_FILE,
    CAPACITY,
    CHUNK_TOKENS,
    LOAD_FAILURE_POLICY,
    MAX_AGE,
    PACKAGES_PATH,
    SETTINGS,
    WEIGHTS,
)

from .schema import Path_, Problem, nearest
from .spec import DecodeSpec, PrefillSpec
from .spec_parts import ChainedConnector, Transfer

_CHUNK_TOKENS: Final = 256
"""Tokens of a stored chunk unless extraConfig says `chunk_tokens`."""
_BESIDE: Final = frozenset({ConnectorName.NIXL, ConnectorName.OFFLOADING, ConnectorName.STORAGE})
"""Connectors that storage may stand beside."""
_BOUNDS: Final = {CAPACITY: "capacity", MAX_AGE: "maxAge"}
"""Settings of the connector that the engine reads from the pool's bounds file, and the fields of
`transfer.storage` that write it."""
_REFUSED_FLAGS: Final = {
    "--no-enable-prefix-caching": "without prefix caching nothing is shared",
    "--calculate-kv-scales": "each engine would have other scales of its fp8 cache",
}
"""Flags of vLLM with which the storage connector does not start, and why."""


def storage_problems(spec: PrefillSpec | DecodeSpec, *, has_handoff: bool) -> Iterator[Problem]:
    """`spec`: of a vLLM pool. Paths begin at `spec`."""
    transfer = spec.transfer
    if transfer.storage is None:
        return
    if transfer.load_failure_policy != LOAD_FAILURE_POLICY:
        yield Problem(
            ("spec", "transfer", "loadFailurePolicy"),
            "with transfer.storage a request whose KV cannot be loaded is computed: leave"
            " loadFailurePolicy out",
        )
    others = [name for name in transfer.connector_names if name not in _BESIDE]
    if has_handoff and others:
        yield Problem(
            ("spec", "transfer", "storage"),
            f"storage stands beside nixl and offloading only, not beside {others[0]}: use nixl, or"
            " leave storage out",
        )
    yield from chunk_problems(spec)
    yield from _engine_problems(spec)


def bounds_problems(spec: PrefillSpec | DecodeSpec) -> Iterator[Problem]:
    """Bounds that the engine would not keep, as those of its bounds file win."""
    for i, link in enumerate(spec.transfer.links):
        if link.connector != ConnectorName.STORAGE or BOUNDS_FILE in link.extra_config:
            continue
        place = ("connectors", i) if spec.transfer.connectors else ()
        for name in sorted(_BOUNDS.keys() & link.extra_config.keys()):
            yield Problem(
                ("spec", "transfer", *place, "extraConfig", name),
                f"has no effect in a pool: write transfer.storage.{_BOUNDS[name]} instead",
            )


def setting_problems(spec: PrefillSpec | DecodeSpec) -> Iterator[Problem]:
    """Settings that the pool's engine does not know: with one it would not start."""
    if spec.transfer.storage is None:
        return
    at, link = _own_link(spec.transfer)
    known = SETTINGS[spec.engine.type]
    for name in sorted(link.extra_config.keys() - {*known}):
        hint = nearest(name, known) or f": known are {', '.join(sorted(known))}"
        yield Problem(
            (*at, "extraConfig", name),
            f"the {spec.engine.type} engine knows no such setting of its store{hint}",
        )


def _own_link(transfer: Transfer) -> tuple[Path_, ChainedConnector]:
    """Where the pool names the storage connector, and how; without settings if it does not."""
    path: Path_ = ("spec", "transfer")
    for i, link in enumerate(transfer.links):
        if link.connector == ConnectorName.STORAGE:
            return (*path, "connectors", i) if transfer.connectors else path, link
    return path, ChainedConnector(connector=ConnectorName.STORAGE)


def chunk_problems(spec: PrefillSpec | DecodeSpec) -> Iterator[Problem]:
    """Chunks that do not consist of whole blocks, and stored KV without a name of its weights."""
    if spec.transfer.storage is None:
        return
    at, link = _own_link(spec.transfer)
    chunk, block = link.extra_config.get(CHUNK_TOKENS, _CHUNK_TOKENS), spec.engine.block_size
    if not isinstance(chunk, int) or chunk < 1 or (block and chunk % block):
        path: Path_ = ("spec", "engine", "blockSize")
        if CHUNK_TOKENS in link.extra_config:
            path = (*at, "extraConfig", CHUNK_TOKENS)
        yield Problem(
            path,
            f"a stored chunk has {chunk} tokens, which must be a multiple of engine.blockSize,"
            f" {block}",
        )
    if spec.model.source.s3 and not link.extra_config.get(WEIGHTS):
        yield Problem(
            ("spec", "model", "source", "s3"),
            "stored KV is keyed by the weights, which are in no files here: name their commit or"
            ' digest in extraConfig of connector storage, like {"weights": "COMMIT"}',
        )


def _engine_problems(spec: PrefillSpec | DecodeSpec) -> Iterator[Problem]:
    """Arguments and variables of the user that the connector cannot start with."""
    for i, argument in enumerate(spec.engine.extra_args):
        reason = _REFUSED_FLAGS.get(argument.partition("=")[0].replace("_", "-"))
        if reason is not None:
            yield Problem(
                ("spec", "engine", "extraArgs", i),
                f"{argument} and transfer.storage exclude each other: {reason}",
            )
    for i, variable in enumerate(spec.engine.env):
        value = variable.get("value")
        is_own = isinstance(value, str) and PACKAGES_PATH not in value.split(":")
        if variable.get("name") == "PYTHONPATH" and is_own:
            yield Problem(
                ("spec", "engine", "env", i, "value"),
                f"vLLM imports the storage connector from {PACKAGES_PATH}: add it to PYTHONPATH",
            )
