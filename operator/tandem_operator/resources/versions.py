"""What each vLLM has and has not: the one table, and what follows for a pool.

Read from the sources of one release of each minor version from 0.10 to 0.32, and of the first
patch release where something appeared; 0.32 is also run by this project's tests. A version newer
than the newest known is taken for that: what it added is not used, what it removed is not known.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from .schema import Path_, Problem
from .spec import OFFLOADING, DecodeSpec, PoolSpec, PrefillSpec

Release = tuple[int, int]
"""Major and minor version."""

NEWEST: Final[Release] = (0, 32)
_OLDEST: Final[Release] = (0, 10)


@dataclass(frozen=True)
class Known:
    """The versions that have a thing: from `since` on, before `until`."""

    since: Release = _OLDEST
    until: Release | None = None

    def has(self, release: Release) -> bool:
        """Whether vLLM `release` has it."""
        return self.since <= release and (self.until is None or release < self.until)

    def __str__(self) -> str:
        until = f" and before {_said(self.until)}" if self.until else ""
        return f"vLLM {_said(self.since)} or later{until}"


HAND_OFF: Final = Known((0, 13))
"""kv_transfer_params that name the producer's request, by which the sidecar and the decode engine
know it, and an explicit kv_load_failure_policy."""
LEASE: Final = Known((0, 22))
"""`kv_lease_duration`, renewed by heartbeats; before it one timeout, in the environment."""
SHUTDOWN_TIMEOUT: Final = Known((0, 18))
"""`--shutdown-timeout`; before it SIGTERM ends requests at once."""
ALL2ALL_FLAG: Final = Known((0, 12))
"""`--all2all-backend`; before it the environment says it."""
OFFLOAD_BYTES: Final = Known((0, 14))
"""`cpu_bytes_to_use` of OffloadingConnector; before it blocks were counted."""
OFFLOAD_PEERS: Final = Known((0, 25))
"""OffloadingConnector's `p2p` tier, which is what makes it a hand-off."""
NIXL_PIPELINE: Final = Known((0, 26))
"""NIXL between engines with pipeline stages."""

CONNECTORS: Final = {
    "nixl": ("NixlConnector", Known()),
    "nixl-push": ("NixlPushConnector", Known((0, 24))),
    "lmcache": ("LMCacheConnectorV1", Known()),
    "mooncake": ("MooncakeConnector", Known((0, 13))),
    "offloading": ("OffloadingConnector", Known((0, 11))),
    "multi": ("MultiConnector", Known()),
}
"""`transfer.connector` → vLLM's class, and who has it."""

_NOT_RENDERED: Final = {
    "p2p-nccl": "vLLM removed P2pNcclConnector in 0.24: use nixl, which within a node moves blocks"
    " over NVLink as well",
    "storage": "storage is not available in this release: use nixl, or multi with nixl and"
    " offloading to keep KV in memory",
}  # fmt: skip

ALL2ALL: Final = {
    "naive": Known(), "pplx": Known(),
    "deepep_high_throughput": Known(), "deepep_low_latency": Known(),
    "allgather_reducescatter": Known((0, 11)), "flashinfer_all2allv": Known((0, 11)),
    "mori": Known((0, 15), (0, 23)), "nixl_ep": Known((0, 18)),
    "flashinfer_nvlink_one_sided": Known((0, 18)), "flashinfer_nvlink_two_sided": Known((0, 18)),
    "mori_high_throughput": Known((0, 23)), "mori_low_latency": Known((0, 23)),
    "deepep_v2": Known((0, 24)), "moonep": Known((0, 31)), "passthrough": Known((0, 32)),
}  # fmt: skip
"""`parallelism.all2allBackend` → who has it."""


def release(version: str) -> Release:
    """Major and minor of a version; the rest changes no flag."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None:
        raise ValueError(f"{version!r} is no version")
    return int(found[1]), int(found[2])


def refusals(spec: PrefillSpec | DecodeSpec) -> Iterator[Problem]:
    """What the pool's engine cannot do, with the fix; paths begin at `spec`."""
    hands_off = isinstance(spec, PrefillSpec) or spec.prefill_ref is not None
    transfer = spec.transfer
    if transfer.require_rdma and transfer.rdma is None:
        yield Problem(
            ("spec", "transfer", "requireRdma"),
            "needs transfer.rdma.resource beside it, the device plugin's name of an RDMA device,"
            " such as rdma/ib",
        )
    if spec.engine.type != "vllm":
        if transfer.require_rdma:
            yield Problem(
                ("spec", "transfer", "requireRdma"),
                "the torch engine moves KV over TCP: leave it out",
            )
        return
    version = release(spec.engine.version)
    if version < _OLDEST:
        yield _needs("Tandem", Known(), spec, ("spec", "engine", "version"))
    elif hands_off and not HAND_OFF.has(version):
        yield _needs("a hand-off", HAND_OFF, spec, ("spec", "engine", "version"))
    elif hands_off:
        yield from _connector_refusals(spec, version)
    backend = spec.parallelism.all2all_backend
    # A name the table lacks is a newer vLLM's, and its own parser's to judge.
    if backend is not None and not (known := ALL2ALL.get(backend, Known())).has(version):
        yield _needs(backend, known, spec, ("spec", "parallelism", "all2allBackend"))


def _connector_refusals(spec: PoolSpec, version: Release) -> Iterator[Problem]:
    transfer, at = spec.transfer, ("spec", "transfer", "connector")
    named: list[tuple[str, Path_]] = [(transfer.connector, at)]
    for i, link in enumerate(transfer.connectors):
        named.append((link.connector, ("spec", "transfer", "connectors", i, "connector")))
    for connector, path in named:
        if (reason := _NOT_RENDERED.get(connector)) is not None:
            yield Problem(path, reason)
        elif not (known := CONNECTORS[connector][1]).has(version):
            yield _needs(f"connector {connector}", known, spec, path)
    for i, link in enumerate(transfer.connectors):
        size = link.extra_config.get("cpu_bytes_to_use", 1)
        if type(size) is not int or size < 1:
            yield Problem(
                ("spec", "transfer", "connectors", i, "extraConfig", "cpu_bytes_to_use"),
                f"{size!r} is no number of bytes: write one, as 10737418240 for 10 GiB",
            )
    if OFFLOADING in transfer.used:
        known = OFFLOAD_PEERS if transfer.hand_off == OFFLOADING else OFFLOAD_BYTES
        if not known.has(version):
            yield _needs("connector offloading as it is used here", known, spec, at)
    if spec.parallelism.pipeline > 1 and "nixl" in transfer.used and not NIXL_PIPELINE.has(version):
        path = ("spec", "parallelism", "pipeline")
        yield _needs("pipeline stages with nixl", NIXL_PIPELINE, spec, path)


def _needs(what: str, known: Known, spec: PoolSpec, path: Path_) -> Problem:
    other = "" if path[-1] == "version" else ", or choose something else here"
    said = f"{what} needs {known}, and engine.version is {spec.engine.version}"
    return Problem(path, f"{said}: take {_said(NEWEST)}{other}")


def _said(release: Release) -> str:
    return ".".join(map(str, release))
