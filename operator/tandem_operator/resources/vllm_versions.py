"""Which vLLM versions have what: the one table, and what follows from it for a pool.

The table was read from the sources of one release of each minor version from 0.10 to 0.32, and of
the first patch release where a feature appeared; this project's tests also run 0.32. A version
newer than the newest known is treated as that one: features it added are not used, and what it
removed is not known here.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from tandem_contract.connectors import TORCH_NIXL_SETTINGS, ConnectorName
from tandem_contract.vllm_storage import CONNECTOR

from .lmcache import lmcache_problems
from .schema import Path_, Problem, nearest
from .spec import SIDECAR, DecodeSpec, PoolSpec, PrefillSpec
from .spec_parts import Transfer
from .storage import bounds_problems, chunk_problems, setting_problems, storage_problems

Release = tuple[int, int]
"""Major and minor version."""

NEWEST: Final[Release] = (0, 32)
_OLDEST: Final[Release] = (0, 10)


@dataclass(frozen=True)
class VersionRange:
    """The versions that have a feature: from `since` on, before `until`."""

    since: Release = _OLDEST
    until: Release | None = None

    def includes(self, release: Release) -> bool:
        """Whether vLLM `release` has the feature."""
        return self.since <= release and (self.until is None or release < self.until)

    def __str__(self) -> str:
        until = f" and before {_dotted(self.until)}" if self.until else ""
        return f"vLLM {_dotted(self.since)} or later{until}"


HANDOFF: Final = VersionRange((0, 13))
"""kv_transfer_params with the prefill engine's request id, by which the sidecar and the decode
engine find the KV, and an explicit kv_load_failure_policy."""
LEASE: Final = VersionRange((0, 22))
"""`kv_lease_duration`, renewed by heartbeats. Older versions have one timeout, in a variable."""
SHUTDOWN_TIMEOUT: Final = VersionRange((0, 18))
"""`--shutdown-timeout`. In older versions SIGTERM ends requests at once."""
ALL2ALL_FLAG: Final = VersionRange((0, 12))
"""`--all2all-backend`. Older versions read a variable."""
OFFLOAD_BYTES: Final = VersionRange((0, 14))
"""`cpu_bytes_to_use` of OffloadingConnector. Older versions count blocks."""
OFFLOAD_PEERS: Final = VersionRange((0, 25))
"""OffloadingConnector's `p2p` tier, with which it can hand KV off."""
NIXL_PIPELINE: Final = VersionRange((0, 26))
"""NIXL between engines with pipeline stages."""
RESUME: Final = VersionRange((0, 32))
"""Streams that go on at another engine with the same tokens. Older ones may do it as well: with
this one, streams that were broken off after each token were compared with unbroken ones."""
SCALE_OUT: Final = VersionRange((0, 32))
"""`--enable-scale-out`, with which the server renders chats, generates from token ids and parses
tokens in requests of their own."""
STORAGE: Final = VersionRange((0, 32))
"""Tandem's storage connector, which was written against the interface of this version."""

CONNECTORS: Final[Mapping[str, tuple[str, VersionRange]]] = {
    ConnectorName.NIXL: ("NixlConnector", VersionRange()),
    ConnectorName.NIXL_PUSH: ("NixlPushConnector", VersionRange((0, 24))),
    ConnectorName.LMCACHE: ("LMCacheConnectorV1", VersionRange()),
    ConnectorName.LMCACHE_MP: ("LMCacheMPConnector", VersionRange((0, 13))),
    ConnectorName.MOONCAKE: ("MooncakeConnector", VersionRange((0, 13))),
    ConnectorName.OFFLOADING: ("OffloadingConnector", VersionRange((0, 11))),
    ConnectorName.MULTI: ("MultiConnector", VersionRange()),
    ConnectorName.STORAGE: (CONNECTOR, STORAGE),
}
"""`transfer.connector` → vLLM's class, or Tandem's, and the versions that have it."""

_NOT_RENDERED: Final[Mapping[str, str]] = {
    ConnectorName.P2P_NCCL: "vLLM removed P2pNcclConnector in 0.24: use nixl, which within a node"
    " moves blocks over NVLink as well",
}
"""`transfer.connector` → why this release does not render it, and what to use instead."""

ALL2ALL: Final = {
    "naive": VersionRange(), "pplx": VersionRange(),
    "deepep_high_throughput": VersionRange(), "deepep_low_latency": VersionRange(),
    "allgather_reducescatter": VersionRange((0, 11)), "flashinfer_all2allv": VersionRange((0, 11)),
    "mori": VersionRange((0, 15), (0, 23)), "nixl_ep": VersionRange((0, 18)),
    "flashinfer_nvlink_one_sided": VersionRange((0, 18)),
    "flashinfer_nvlink_two_sided": VersionRange((0, 18)),
    "mori_high_throughput": VersionRange((0, 23)), "mori_low_latency": VersionRange((0, 23)),
    "deepep_v2": VersionRange((0, 24)), "moonep": VersionRange((0, 31)),
    "passthrough": VersionRange((0, 32)),
}  # fmt: skip
"""`parallelism.all2allBackend` → the versions that have it."""


def parse_release(version: str) -> Release:
    """Major and minor of a version; patch releases change no flag. Raises ValueError."""
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"{version!r} is not a version")
    return int(match[1]), int(match[2])


def unsupported_settings(spec: PrefillSpec | DecodeSpec) -> Iterator[Problem]:
    """Settings that the pool's engine does not support, with the fix; paths begin at `spec`."""
    has_handoff = isinstance(spec, PrefillSpec) or spec.prefill_ref is not None
    yield from _contradictions(spec.transfer)
    yield from bounds_problems(spec)
    yield from setting_problems(spec)
    if spec.engine.type != "vllm":
        yield from _unsupported_by_torch(spec.transfer)
        yield from chunk_problems(spec)
        return
    release = parse_release(spec.engine.version)
    if release < _OLDEST:
        yield _requires("Tandem", VersionRange(), spec, ("spec", "engine", "version"))
    # A pool without a hand-off may run an older version.
    elif has_handoff and not HANDOFF.includes(release):
        yield _requires("a hand-off", HANDOFF, spec, ("spec", "engine", "version"))
    else:
        if has_handoff:
            yield from _unsupported_transfer(spec, release)
        yield from _unsupported_offloading(spec, release, has_handoff=has_handoff)
        if spec.transfer.storage is not None and not STORAGE.includes(release):
            yield _requires(
                "transfer.storage", STORAGE, spec, ("spec", "transfer", "storage", "endpoint")
            )
    yield from storage_problems(spec, has_handoff=has_handoff)
    own_sidecar = isinstance(spec, DecodeSpec) and _has_own_sidecar(spec)
    yield from lmcache_problems(spec, own_sidecar=own_sidecar)
    if not has_handoff and not own_sidecar:
        yield from _unsupported_by_the_sidecar(spec)
    backend = spec.parallelism.all2all_backend
    # A backend that the table lacks may be one of a newer vLLM; vLLM refuses it if it is not.
    if backend is not None:
        versions = ALL2ALL.get(backend, VersionRange())
        if not versions.includes(release):
            yield _requires(backend, versions, spec, ("spec", "parallelism", "all2allBackend"))


def _unsupported_by_torch(transfer: Transfer) -> Iterator[Problem]:
    """Settings of `transfer` that the torch engine lacks. With an unknown one of nixl it would not
    start; those of its store are checked elsewhere."""
    if transfer.require_rdma:
        yield Problem(
            ("spec", "transfer", "requireRdma"),
            "the torch engine moves KV over TCP: leave it out",
        )
    if transfer.connector != ConnectorName.NIXL:
        return
    for name in sorted(transfer.extra_config.keys() - {*TORCH_NIXL_SETTINGS}):
        known = f": known are {', '.join(TORCH_NIXL_SETTINGS)}"
        yield Problem(
            ("spec", "transfer", "extraConfig", name),
            "the torch engine knows no such setting of nixl"
            f"{nearest(name, TORCH_NIXL_SETTINGS) or known}",
        )


def _contradictions(transfer: Transfer) -> Iterator[Problem]:
    """Fields of `transfer` that do not fit each other, whatever the engine."""
    if transfer.require_rdma and transfer.rdma is None:
        yield Problem(
            ("spec", "transfer", "requireRdma"),
            "needs transfer.rdma.resource beside it, the device plugin's name of an RDMA device,"
            " such as rdma/ib",
        )
    if transfer.connectors and transfer.extra_config:
        yield Problem(
            ("spec", "transfer", "extraConfig"),
            "belongs to a single connector: move it to the one of connectors[] that it is for",
        )


def _unsupported_transfer(spec: PoolSpec, release: Release) -> Iterator[Problem]:
    """Connectors, and uses of them, that this vLLM does not have."""
    transfer, at = spec.transfer, ("spec", "transfer", "connector")
    named: list[tuple[str, Path_]] = [(transfer.connector, at)]
    for i, link in enumerate(transfer.connectors):
        named.append((link.connector, ("spec", "transfer", "connectors", i, "connector")))
    for connector, path in named:
        if (reason := _NOT_RENDERED.get(connector)) is not None:
            yield Problem(path, reason)
        elif not (versions := CONNECTORS[connector][1]).includes(release):
            yield _requires(f"connector {connector}", versions, spec, path)
    names = transfer.connector_names
    has_stages = spec.parallelism.pipeline > 1
    if has_stages and ConnectorName.NIXL in names and not NIXL_PIPELINE.includes(release):
        path = ("spec", "parallelism", "pipeline")
        yield _requires("pipeline stages with nixl", NIXL_PIPELINE, spec, path)


def _unsupported_offloading(
    spec: PoolSpec, release: Release, *, has_handoff: bool
) -> Iterator[Problem]:
    """The offloading connector where vLLM does not have it or cannot start it.

    It works without a hand-off, too, as a tier of the KV cache in host memory.
    """
    transfer, at = spec.transfer, ("spec", "transfer", "connector")
    for i, link in enumerate(transfer.links):
        size = link.extra_config.get("cpu_bytes_to_use", 1)
        if type(size) is not int or size < 1:
            place = ("connectors", i) if transfer.connectors else ()
            yield Problem(
                ("spec", "transfer", *place, "extraConfig", "cpu_bytes_to_use"),
                f"{size!r} is not a number of bytes: write one, such as 10737418240 for 10 GiB",
            )
    if transfer.offloading is None:
        return
    hands_off = has_handoff and transfer.handoff_connector == ConnectorName.OFFLOADING
    versions = OFFLOAD_PEERS if hands_off else OFFLOAD_BYTES
    if not versions.includes(release):
        yield _requires("connector offloading as it is used here", versions, spec, at)
    elif spec.accelerator.count == 0:
        yield Problem(
            at,
            "vLLM does not start connector offloading on a CPU: leave it out, or give"
            " accelerator.count",
        )


def _unsupported_by_the_sidecar(spec: PoolSpec) -> Iterator[Problem]:
    """A connector for which Tandem's sidecar exits, in a pool without a hand-off.

    It has a sidecar as well, which gets the connector's name. With a hand-off, connectors that are
    not rendered are reported already.
    """
    connector = spec.transfer.handoff_connector
    if connector in _NOT_RENDERED:
        yield Problem(("spec", "transfer", "connector"), _NOT_RENDERED[connector])


def _has_own_sidecar(spec: DecodeSpec) -> bool:
    """Whether the template gives the sidecar another image."""
    containers = spec.template.spec.get("initContainers")
    # Templates of another shape are reported where they are merged.
    return isinstance(containers, list) and any(
        isinstance(c, dict) and c.get("name") == SIDECAR and c.get("image") for c in containers
    )


def _requires(feature: str, versions: VersionRange, spec: PoolSpec, path: Path_) -> Problem:
    alternative = "" if path[-1] == "version" else ", or choose something else here"
    return Problem(
        path,
        f"{feature} needs {versions}, and engine.version is {spec.engine.version}:"
        f" take {_dotted(NEWEST)}{alternative}",
    )


def _dotted(release: Release) -> str:
    return ".".join(map(str, release))
