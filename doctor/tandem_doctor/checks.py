"""The checks: facts in, findings with their fixes out. Pure.

docs/operate/troubleshooting.md lists them.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from tandem_contract import metrics
from tandem_contract.paths import ErrorPhase, Role, RoutingPath
from tandem_planner.fabrics import FABRICS, Fabric

from . import compatibility, lmcache
from .data_ports import check_data_ports
from .estimates import check_estimates
from .facts import Engine, Facts, Gpu, Sidecar
from .findings import Finding, Severity
from .gateways import check_gateway
from .keys import check_engine_keys, check_pair_keys, check_sidecar_keys
from .network import check_network
from .storage_use import check_storage_use

_OK, _UNKNOWN, _WARNING, _BROKEN = (
    Severity.OK,
    Severity.UNKNOWN,
    Severity.WARNING,
    Severity.BROKEN,
)
_SLOW: Final = 0.5
"""A transfer rate below this share of the assumed rate is a warning."""
_MIN_BYTES: Final = 64e6
"""Bytes that must have been transferred to judge the rate: with fewer, handshakes and start-up
dominate the measured time."""
_MAX_FALLBACKS: Final = 0.01
"""Fallbacks above this share of all requests are a warning."""
_MIN_WAITING: Final = 4.0
"""Requests waiting for one role, while the other role is idle, that are a warning."""
_READ_LOG: Final = (
    "read its log: kubectl logs POD -c {0}; of tandem up: pods/POD/{0}.log in the run directory"
)


def run_checks(facts: Facts) -> tuple[Finding, ...]:
    """All findings, the most severe first."""
    handshakes = Counter[str]()
    for engine in facts.engines:
        handshakes[engine.group] += int(engine.counters.get(metrics.ENGINE_HANDSHAKES_FAILED, 0))
    findings = [
        finding
        for engine in facts.engines
        for finding in _check_engine(engine, handshakes[engine.group])
    ]
    findings += [finding for sidecar in facts.sidecars for finding in _check_sidecar(sidecar)]
    for prefill, decode in pairs(facts):
        findings += compatibility.compare(prefill, decode)
        findings += check_pair_keys(prefill, decode)
    findings += _check_partners(facts)
    findings += _check_engine_ids(facts)
    findings += _check_balance(facts)
    findings += _check_gpus(facts)
    findings += check_estimates(facts.epps)
    findings += [finding for report in facts.epps for finding in check_gateway(report)]
    findings += check_network(facts)
    for engine in facts.engines:
        findings += check_data_ports(engine, facts.machine_ports)
    # The sort is stable: findings of one severity keep the order of the checks.
    order = list(Severity)
    return tuple(sorted(findings, key=lambda f: -order.index(f.severity)))


def pairs(facts: Facts) -> list[tuple[Engine, Engine]]:
    """The prefill and decode engines to compare: both answer, in one group, and they are paired.

    An engine without any partner is compared with all others of its group, to show why.
    """
    prefills = [e for e in facts.engines if e.role is Role.PREFILL]
    decodes = [e for e in facts.engines if e.role is Role.DECODE]
    return [
        (p, d)
        for p in prefills
        for d in decodes
        # An engine that does not answer has its own finding; its properties are unknown.
        if p.error is None and d.error is None and p.group == d.group
        if p.compat == d.compat or _has_no_partner(p, decodes) or _has_no_partner(d, prefills)
    ]


def _has_no_partner(engine: Engine, others: Sequence[Engine]) -> bool:
    """Whether the engine is paired with none of `others`.

    An engine that has partners may differ from other engines without fault: those are of another
    revision or another set.
    """
    return not any(o.group == engine.group and o.compat == engine.compat for o in others)


def _check_engine(engine: Engine, failed_handshakes: int) -> Iterator[Finding]:
    if engine.error is not None:
        fix = _READ_LOG.format("engine")
        yield Finding(_BROKEN, "reachable", engine.pod, engine.error, fix)
        return
    yield Finding(_OK, "reachable", engine.pod, f"answers at {engine.address}")
    yield from check_storage_use(engine)
    # A unified engine takes part in no hand-off, so the checks below do not apply.
    if engine.role is Role.UNIFIED:
        return
    yield from _check_role(engine)
    yield from _check_load_failure(engine)
    yield from _check_side_channel(engine)
    yield from check_engine_keys(engine)
    yield from _check_lost_kv(engine, failed_handshakes)
    if engine.role is not Role.DECODE:
        return
    # Only NIXL counts bytes. Where both are in a chain, the engine's count of hits is of both.
    if lmcache.is_alone(engine):
        yield from lmcache.check_hits(engine)
    else:
        yield from _check_transfer_rate(engine)


def _check_role(engine: Engine) -> Iterator[Finding]:
    if engine.command is None:
        return
    if not engine.command.kv_transfer_config:
        detail = "the engine has no --kv-transfer-config: it can neither send nor receive KV"
        yield Finding(_BROKEN, "role", engine.pod, detail, "set transfer.connector on its pool")
        return
    expected = "kv_producer" if engine.role is Role.PREFILL else "kv_consumer"
    fix = f"start it with kv_role {expected}"
    role = engine.command.kv_transfer_config.get("kv_role")
    if role == "kv_both":
        yield Finding(_WARNING, "role", engine.pod, "kv_both, which vLLM deprecates", fix)
    elif role != expected:
        detail = f"the engine of a {engine.role.value} pod has kv_role {role}, not {expected}"
        yield Finding(_BROKEN, "role", engine.pod, detail, fix)


def _check_load_failure(engine: Engine) -> Iterator[Finding]:
    if engine.role is not Role.DECODE or engine.command is None:
        return
    # Without the field vLLM fails the request.
    policy = engine.command.kv_transfer_config.get("kv_load_failure_policy", "fail")
    if policy != "recompute":
        detail = (
            "kv_load_failure_policy is fail: vLLM answers 500 when KV does not arrive, and only "
            "Tandem's sidecar and router then send the request again"
        )
        fix = "set transfer.loadFailurePolicy: recompute, unless a late answer is worse than none"
        yield Finding(_WARNING, "load failure", engine.pod, detail, fix)


def _check_side_channel(engine: Engine) -> Iterator[Finding]:
    channel = engine.side_channel
    if channel is None:
        if engine.command is not None and not engine.command.uses("Nixl"):
            return
        fix = "run tandem doctor inside the cluster, where pods reach each other"
        yield Finding(_UNKNOWN, "side channel", engine.pod, "cannot be reached from here", fix)
    elif channel.error is None:
        yield Finding(_OK, "side channel", engine.pod, f"answers at {channel.address}")
    # Only prefill engines serve reads: a decode engine's side channel may be closed.
    elif engine.role is Role.PREFILL:
        fix = (
            "open that port (NIXL: 5600 and one for each further rank) and UCX's data ports "
            "(transfer.dataPorts) between the pods, and set VLLM_NIXL_SIDE_CHANNEL_HOST to an "
            "address that the other side can reach"
        )
        detail = f"{channel.address}: {channel.error}"
        yield Finding(_BROKEN, "side channel", engine.pod, detail, fix)


def _check_lost_kv(engine: Engine, failed_handshakes: float) -> Iterator[Finding]:
    """`failed_handshakes`: of the readers in its group."""
    expiry_fix = (
        "raise transfer.leaseDuration, or add decode pods: requests wait too long for decode"
    )
    if failed_handshakes:
        expiry_fix = (
            "see the finding on handshakes of the decode engines: KV expires unread when a reader "
            "cannot begin, and a longer lease does not help"
        )
    causes = {
        metrics.ENGINE_HANDSHAKES_FAILED: (
            "handshakes with a prefill engine failed",
            "the decode engine cannot begin to read: check that VLLM_NIXL_SIDE_CHANNEL_HOST of the "
            "prefill engine is an address that it reaches, that the side channel's port is open, "
            "and that both run the same version (compatible); its log names the cause",
        ),
        metrics.ENGINE_XFER_FAILED: (
            "transfers failed",
            "check the side channel, the network and that no prefill pod was killed; with "
            "loadFailurePolicy: recompute the decode engine computes the missing KV itself; if all "
            "of that is right, start both engines with --enforce-eager (engine.extraArgs) once, to "
            "rule out CUDA graphs",
        ),
        metrics.ENGINE_KV_EXPIRED: ("prompts' KV expired before it was read", expiry_fix),
    }
    for metric, (event, fix) in causes.items():
        if count := engine.counters.get(metric, 0.0):
            detail = f"{count:.0f} {event} since it started"
            yield Finding(_WARNING, "lost KV", engine.pod, detail, fix)


def _check_transfer_rate(engine: Engine) -> Iterator[Finding]:
    """Compare the measured rate with the one that the planner assumes of the fabric."""
    transferred = engine.counters.get(f"{metrics.ENGINE_XFER_BYTES}_sum", 0.0)
    seconds = engine.counters.get(f"{metrics.ENGINE_XFER_SECONDS}_sum", 0.0)
    if transferred < _MIN_BYTES or not seconds:
        detail = (
            f"{transferred / 1e6:.1f} MB of KV received: too little to judge the rate "
            f"(below {_MIN_BYTES / 1e6:.0f} MB)"
        )
        fix = "send more prompts that are long enough to be split, then run tandem doctor again"
        yield Finding(_UNKNOWN, "transfer rate", engine.pod, detail, fix)
        return
    # Several fabrics may be open: the target is that of the fastest one.
    rate, fabric = transferred / seconds, _fastest_fabric(engine)
    detail = f"{transferred / 1e6:.1f} MB at {rate / 1e9:.3f} GB/s over {_fabric_names(engine)}"
    if rate >= _SLOW * FABRICS[fabric].assumed:
        yield Finding(_OK, "transfer rate", engine.pod, detail)
        return
    detail += f"; plans assume {FABRICS[fabric].assumed / 1e9:.0f} GB/s for {fabric.value}"
    yield Finding(_WARNING, "transfer rate", engine.pod, detail, _rate_fix(engine))


def _fastest_fabric(engine: Engine) -> Fabric:
    """The fastest fabric that is open; TCP, of which plans assume least, if none is known."""
    return max(engine.fabrics or {Fabric.TCP}, key=lambda fabric: FABRICS[fabric].assumed)


def _fabric_names(engine: Engine) -> str:
    names = sorted(f.value for f in engine.fabrics or ())
    return " and ".join(names) or "a transport that is not visible from here"


def _rate_fix(engine: Engine) -> str:
    transports = engine.command.environment.get("UCX_TLS", "") if engine.command else ""
    # UCX uses only the transports that UCX_TLS lists.
    if Fabric.RDMA not in (engine.fabrics or ()) and transports:
        return (
            f"UCX_TLS is {transports}: if the nodes have RDMA cards, give pods the resource "
            "(transfer.rdma), let UCX_TLS include rc, and set transfer.requireRdma so that TCP is "
            "an error; short transfers never reach the rate, since the handshake dominates"
        )
    return (
        "set transfer.bufferDevice: cuda, and placement.topologyKey so that paired pods are placed "
        "near each other"
    )


def _check_sidecar(sidecar: Sidecar) -> Iterator[Finding]:
    if sidecar.error is not None:
        fix = f"{_READ_LOG.format('sidecar')}; a sidecar that restarts logs the reason last"
        yield Finding(_BROKEN, "sidecar", sidecar.pod, sidecar.error, fix)
        return
    if sidecar.not_ready is not None:
        fix = "a draining pod ends by itself; if the engine does not answer, read the engine's log"
        yield Finding(_WARNING, "sidecar", sidecar.pod, sidecar.not_ready, fix)
    yield from check_sidecar_keys(sidecar)
    # Requests are split by path: the sum over all paths is the base of the share.
    total = sum(v for k, v in sidecar.counters.items() if k.startswith(f"{metrics.REQUESTS}{{"))
    fallbacks = sidecar.counters.get(metrics.FALLBACKS, 0.0)
    if total and fallbacks / total > _MAX_FALLBACKS:
        detail = f"{fallbacks:.0f} of {total:.0f} requests should have been split but were not"
        fix = (
            "tandem trace REQUEST_ID shows the reason for one request; the sidecar's log names the "
            "prefill pod that failed"
        )
        yield Finding(_WARNING, "fallbacks", sidecar.pod, detail, fix)
    failed_transfers = sidecar.counters.get(
        f"{metrics.ERRORS}{{{ErrorPhase.KV_TRANSFER.value}}}", 0.0
    )
    if failed_transfers:
        detail = f"{failed_transfers:.0f} hand-offs whose KV did not arrive"
        fix = "see the findings on side channel and lost KV of its engine and of the prefill pods"
        yield Finding(_WARNING, "lost KV", sidecar.pod, detail, fix)
    split = RoutingPath.PREFILL_THEN_DECODE
    handoffs = sidecar.counters.get(f"{metrics.REQUESTS}{{{split}}}", 0.0)
    streamed = sidecar.counters.get(metrics.STREAMED_HANDOFFS, 0.0)
    if handoffs and streamed:
        detail = (
            f"{streamed:.0f} of {handoffs:.0f} hand-offs moved KV while the prefill computed it"
        )
        yield Finding(_OK, "streamed KV", sidecar.pod, detail)


def _check_partners(facts: Facts) -> Iterator[Finding]:
    """Each decode engine needs a prefill engine that it is paired with."""
    prefills = [e for e in facts.engines if e.role is Role.PREFILL]
    for engine in facts.engines:
        if engine.role is not Role.DECODE or engine.error is not None:
            continue
        if _has_no_partner(engine, prefills):
            detail = "no prefill engine is paired with it: it serves all requests alone"
            fix = "see the differences under compatible, or scale its PrefillPool up"
            yield Finding(_WARNING, "partner", engine.pod, detail, fix)


def _check_engine_ids(facts: Facts) -> Iterator[Finding]:
    """Peers cache an engine's metadata by engine id, so no two engines may have the same id."""
    pods: dict[str, str] = {}
    for engine in facts.engines:
        engine_id = engine.command.kv_transfer_config.get("engine_id") if engine.command else None
        if engine_id is None:
            continue
        if str(engine_id) in pods:
            yield Finding(
                _BROKEN,
                "engine id",
                f"{pods[str(engine_id)]}, {engine.pod}",
                f"both have engine id {engine_id}",
                "give each its own in --kv-transfer-config (the operator uses the pod's uid)",
            )
        # The last pod, so that three equal ids are reported as two pairs.
        pods[str(engine_id)] = engine.pod


def _check_balance(facts: Facts) -> Iterator[Finding]:
    for group in sorted({e.group for e in facts.engines}):
        waiting, running = dict.fromkeys(Role, 0.0), dict.fromkeys(Role, 0.0)
        for engine in facts.engines:
            if engine.group == group:
                waiting[engine.role] += engine.counters.get(metrics.ENGINE_WAITING, 0.0)
                running[engine.role] += engine.counters.get(metrics.ENGINE_RUNNING, 0.0)
        for busy, idle in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            # Both must hold: queues alone mean that the whole set is too small.
            if waiting[busy] >= _MIN_WAITING and not running[idle] and not waiting[idle]:
                detail = f"{waiting[busy]:.0f} requests wait for {busy.value}; {idle.value} is idle"
                fix = f"add {busy.value} replicas, or let a unified pool serve both phases"
                yield Finding(_WARNING, "balance", group, detail, fix)


def _check_gpus(facts: Facts) -> Iterator[Finding]:
    if facts.gpus is None:
        fix = "run tandem doctor on the node, with NVIDIA's driver, to see how GPUs are connected"
        yield Finding(_UNKNOWN, "GPU topology", "this machine", facts.gpus_error, fix)
        return
    for gpu in facts.gpus:
        yield _check_gpu(gpu)


def _check_gpu(gpu: Gpu) -> Finding:
    levels = ", ".join(f"{other}: {level}" for other, level in sorted(gpu.nearness.items()))
    subject, detail = f"GPU {gpu.index}", f"{gpu.name}; to {levels or 'no other'}"
    if "across sockets" in gpu.nearness.values():
        fix = "give prefill and decode of a set GPUs of one socket, or GPUs connected by NVLink"
        return Finding(_WARNING, "GPU topology", subject, detail, fix)
    return Finding(_OK, "GPU topology", subject, detail)
