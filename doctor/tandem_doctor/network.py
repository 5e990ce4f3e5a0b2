"""Checks whether the network suits the hand-offs: what a transfer takes beside the prefill that it
spares, the devices that UCX is told to use, and the path of the blocks. Pure."""

from collections.abc import Collection, Iterator, Sequence
from fnmatch import filter as filter_names
from statistics import median
from typing import Final

from tandem_contract import environment, metrics
from tandem_contract.commandline import is_loopback
from tandem_contract.paths import Role
from tandem_contract.pod_reports import (
    KV_BYTES,
    PREFILL_RATE,
    TRANSFER_RATE,
    TRANSFER_SECONDS,
    PodReport,
    Source,
)
from tandem_planner.fabrics import Fabric, Verdict, least_rate, verdict

from .facts import Engine, EppReport, Facts
from .findings import Finding, Severity

_PROMPT: Final = 8000
"""Tokens of the prompt that the transfer is judged by, as network minima usually are."""
_DEVICES: Final = "UCX_NET_DEVICES"
_EVERY_DEVICE: Final = ("", "all")
_TRANSPORTS: Final = "UCX_TLS"
_ANY_TRANSPORT: Final = frozenset({"all"})
_WITHOUT_RDMA: Final = frozenset(
    {"tcp", "self", "sm", "shm", "posix", "sysv", "cma", "knem", "xpmem"}
    | {"cuda", "cuda_copy", "cuda_ipc", "gdr_copy", "rocm", "rocm_copy", "rocm_ipc"}
)
"""UCX's transports that use no RDMA device."""
_DEFAULT_HOST: Final = "localhost"
"""vLLM's default of the side channel's address."""


def check_network(facts: Facts) -> Iterator[Finding]:
    """Findings on transfers that EPPs have learned, on UCX's devices and on staged blocks."""
    fp8 = {e.pod for e in facts.engines if e.cache.get("cache_dtype", "").startswith("fp8")}
    for report in facts.epps:
        yield from _check_transfers(report, fp8)
    for engine in facts.engines:
        if engine.role is not Role.UNIFIED and engine.command is not None:
            has_gpu = engine.has_gpu or bool(facts.gpus)
            yield from _check_devices(engine, facts.network_devices)
            yield from _check_transport(engine, facts.network_devices, has_gpu=has_gpu)
            yield from _check_buffer(engine, has_gpu=has_gpu)
        yield from _check_side_channel_host(engine, facts)


def _check_transfers(report: EppReport, fp8: Collection[str]) -> Iterator[Finding]:
    for pod in report.pods:
        rates = _prefill_rates(report.pods, pod)
        transfer = pod.estimates.get("transfer")
        if transfer is None or transfer.source is Source.PRIOR or not rates:
            continue
        figures = transfer.figures
        if not {TRANSFER_RATE, KV_BYTES} <= figures.keys():
            continue
        prefill, kv_bytes = _PROMPT / median(rates), _PROMPT * figures[KV_BYTES]
        rate = figures[TRANSFER_RATE] * 1e9
        seconds = figures.get(TRANSFER_SECONDS, 0.0) + kv_bytes / rate
        judgement = verdict(seconds, prefill)
        detail = (
            f"the KV of a prompt of {_PROMPT:,} tokens has {kv_bytes / 1e9:.3g} GB and takes "
            f"{seconds * 1e3:.3g} ms at {_gigabits(rate)}, its prefill {prefill * 1e3:.3g} ms: "
            f"{judgement.value}; at least {_gigabits(least_rate(kv_bytes, prefill))} are needed"
        )
        subject = f"{report.epp}: {pod.name}"
        if judgement is not Verdict.TOO_SLOW:
            yield Finding(Severity.OK, "network", subject, detail)
        else:
            fix = _slow_fix(is_fp8=pod.name in fp8)
            yield Finding(Severity.WARNING, "network", subject, detail, fix)


def _prefill_rates(pods: Sequence[PodReport], decode: PodReport) -> list[float]:
    """Measured tokens per second of the prefill pods that serve the models of `decode`."""
    return [
        rate
        for pod in pods
        if pod.role == Role.PREFILL.value and pod.models == decode.models
        if (estimate := pod.estimates.get("prefill")) is not None
        if estimate.source is not Source.PRIOR
        if (rate := estimate.figures.get(PREFILL_RATE, 0.0)) > 0.0
    ]


def _slow_fix(*, is_fp8: bool) -> str:
    smaller = "" if is_fp8 else "halve the KV with engine.kvCacheDtype: fp8 on both pools; "
    return (
        f"{smaller}give the pods RDMA (transfer.rdma), or place prefill and decode pods near each "
        "other (placement.topologyKey); until then the EPP splits only where it still pays"
    )


def _gigabits(rate: float) -> str:
    return f"{rate * 8 / 1e9:.3g} Gbit/s"


def _check_devices(engine: Engine, existing: Collection[str] | None) -> Iterator[Finding]:
    """Compare the devices that UCX may use with those of the engine's machine, if it is visible."""
    names = engine.command.environment.get(_DEVICES, "") if engine.command else ""
    # With ^ the list names the devices that UCX may not use.
    if existing is None or names in _EVERY_DEVICE or names.startswith("^"):
        return
    devices = [name.strip() for name in names.split(",")]
    # UCX compares names as shell patterns: mlx5_* is one.
    missing = [name for name in devices if name != "all" and not filter_names(existing, name)]
    if not missing:
        return
    severity = Severity.BROKEN if len(missing) == len(devices) else Severity.WARNING
    detail = (
        f"{_DEVICES} names {', '.join(missing)}; this machine has "
        f"{', '.join(sorted(existing)) or 'no network device'}"
    )
    fix = f"set {_DEVICES} in engine.env to devices that exist, or to all"
    yield Finding(severity, "network devices", engine.pod, detail, fix)


def _check_transport(
    engine: Engine, devices: Collection[str] | None, *, has_gpu: bool
) -> Iterator[Finding]:
    """TCP where RDMA was asked for (UCX_TLS, devices) or is expected (a GPU, an RDMA device)."""
    transports = engine.command.environment.get(_TRANSPORTS, "") if engine.command else ""
    named = {word.strip() for word in transports.split(",")}
    # With ^ the list names the transports that UCX may not use.
    is_list = bool(transports) and not transports.startswith("^")
    has_rdma_device = any(":" in device for device in devices or ())
    if is_list and named <= _WITHOUT_RDMA:
        reason = "an RDMA device" if has_rdma_device else "a GPU" if has_gpu else ""
        detail = f"{_TRANSPORTS} is {transports} on a machine with {reason}: KV goes over TCP"
    elif {*(engine.fabrics or ())} == {Fabric.TCP}:
        is_asked = has_rdma_device or (is_list and not named <= _WITHOUT_RDMA | _ANY_TRANSPORT)
        reason = "RDMA was asked for" if is_asked else ""
        detail = "KV goes over TCP, although RDMA is set up or asked for"
    else:
        return
    if reason:
        fix = (
            "give the pods the RDMA resource (transfer.rdma), let UCX_TLS include rc, and set "
            "transfer.requireRdma so that TCP is an error"
        )
        yield Finding(Severity.WARNING, "transport", engine.pod, detail, fix)


def _check_side_channel_host(engine: Engine, facts: Facts) -> Iterator[Finding]:
    """A prefill engine that tells readers on other machines to connect to themselves."""
    host = _side_channel_host(engine, facts)
    readers = [e for e in facts.engines if e.role.serves(Role.DECODE) and e.group == engine.group]
    own = _host(engine)
    is_remote = any(_host(reader) != own for reader in readers)
    if host and is_loopback(host) and not is_loopback(own) and is_remote:
        detail = (
            f"{environment.SIDE_CHANNEL_HOST} is {host}: decode engines on other machines look for "
            "the KV on their own"
        )
        fix = f"set {environment.SIDE_CHANNEL_HOST} to an address that the decode engines reach"
        yield Finding(Severity.BROKEN, "side channel", engine.pod, detail, fix)


def _side_channel_host(engine: Engine, facts: Facts) -> str | None:
    """Where readers begin the handshake of NIXL; None: it is not known, or not NIXL's."""
    if engine.command is not None:
        is_asked = engine.role is Role.PREFILL and engine.command.uses("Nixl")
        name = engine.command.environment.get(environment.SIDE_CHANNEL_HOST) or _DEFAULT_HOST
        return name if is_asked else None
    # A sidecar or router knows it from its hand-offs.
    figure = f"{metrics.LOOPBACK_SIDE_CHANNELS}{{{engine.address}}}"
    is_local = any(sidecar.counters.get(figure) for sidecar in facts.sidecars)
    return _DEFAULT_HOST if is_local else None


def _host(engine: Engine) -> str:
    return engine.address.rpartition(":")[0].strip("[]")


def _check_buffer(engine: Engine, *, has_gpu: bool) -> Iterator[Finding]:
    transfer = engine.command.kv_transfer_config if engine.command else {}
    if has_gpu and transfer.get("kv_buffer_device") == "cpu":
        detail = "kv_buffer_device is cpu: every block is copied through the host's memory twice"
        fix = (
            "set transfer.bufferDevice: cuda if the network cards can read the GPU's memory "
            "(GPUDirect RDMA)"
        )
        yield Finding(Severity.WARNING, "buffer", engine.pod, detail, fix)
