"""What the facts mean: findings, each with its fix (seed 004's troubleshooting tables). Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from tandem_contract import metrics
from tandem_contract.paths import ErrorPhase, Role
from tandem_planner.fabrics import ASSUMED_RATE, Fabric

from . import compatibility
from .facts import Engine, Facts, Gpu, Sidecar
from .findings import Finding, Severity

_OK, _UNKNOWN, _WARNING, _BROKEN = (
    Severity.OK,
    Severity.UNKNOWN,
    Severity.WARNING,
    Severity.BROKEN,
)
_SLOW: Final = 0.5
"""Below this share of the assumed rate a transfer is called slow."""
_ENOUGH: Final = 64e6
"""Bytes below which handshakes and start-up are most of what was measured."""
_FALLBACKS: Final = 0.01
"""Above this share of all requests fallbacks are worth a look."""
_IDLE_BESIDE: Final = 4.0
"""Requests waiting for one role, with none running on the other, that make an imbalance."""


def diagnose(facts: Facts) -> tuple[Finding, ...]:
    """Everything there is to say, broken things first."""
    found = [finding for engine in facts.engines for finding in _engine(engine)]
    found += [finding for sidecar in facts.sidecars for finding in _sidecar(sidecar)]
    for prefill, decode in pairs(facts):
        found += compatibility.compare(prefill, decode)
    found += _partners(facts)
    found += _identities(facts)
    found += _balance(facts)
    found += _gpus(facts)
    order = list(Severity)
    return tuple(sorted(found, key=lambda f: -order.index(f.severity)))


def pairs(facts: Facts) -> list[tuple[Engine, Engine]]:
    """Prefill and decode engines that answer and may be given one request."""
    prefills = [e for e in facts.engines if e.role is Role.PREFILL]
    decodes = [e for e in facts.engines if e.role is Role.DECODE]
    return [
        (p, d)
        for p in prefills
        for d in decodes
        if p.trouble is None and d.trouble is None and p.group == d.group
        if p.compat == d.compat or _alone(p, decodes) or _alone(d, prefills)
    ]


def _alone(engine: Engine, others: Sequence[Engine]) -> bool:
    """Whether it is paired with none: with partners of its own, what differs from it is another
    revision, or another set, and no fault."""
    return not any(o.group == engine.group and o.compat == engine.compat for o in others)


def _engine(engine: Engine) -> Iterator[Finding]:
    if engine.trouble is not None:
        fix = "look at the engine's log; on a cluster: kubectl logs POD -c engine"
        yield Finding(_BROKEN, "reachable", engine.pod, engine.trouble, fix)
        return
    yield Finding(_OK, "reachable", engine.pod, f"answers at {engine.address}")
    if engine.role is Role.UNIFIED:
        return
    yield from _role(engine)
    yield from _policy(engine)
    yield from _side_channel(engine)
    yield from _lost(engine)
    if engine.role is Role.DECODE:
        yield from _rate(engine)


def _role(engine: Engine) -> Iterator[Finding]:
    if engine.declared is None:
        return
    if not engine.declared.transfer:
        seen = "the engine has no --kv-transfer-config: it can neither hand KV over nor take it"
        yield Finding(_BROKEN, "role", engine.pod, seen, "set transfer.connector on its pool")
        return
    wanted = "kv_producer" if engine.role is Role.PREFILL else "kv_consumer"
    role = engine.declared.transfer.get("kv_role")
    if role == "kv_both":
        seen = "kv_both, which vLLM deprecates"
        yield Finding(_WARNING, "role", engine.pod, seen, f"start it with kv_role {wanted}")
    elif role != wanted:
        seen = f"a {engine.role.value} pod whose engine is {role}: the roles are swapped"
        yield Finding(_BROKEN, "role", engine.pod, seen, f"start it with kv_role {wanted}")


def _policy(engine: Engine) -> Iterator[Finding]:
    if engine.role is not Role.DECODE or engine.declared is None:
        return
    if engine.declared.transfer.get("kv_load_failure_policy", "fail") != "recompute":
        seen = "kv_load_failure_policy is fail: KV that does not arrive is a 500"
        fix = "set transfer.loadFailurePolicy: recompute, unless a late answer is worse than none"
        yield Finding(_WARNING, "load failure", engine.pod, seen, fix)


def _side_channel(engine: Engine) -> Iterator[Finding]:
    channel = engine.side_channel
    if channel is None:
        if engine.declared is not None and not engine.declared.uses("Nixl"):
            return
        fix = "run tandem doctor inside the cluster, where pods reach each other"
        yield Finding(_UNKNOWN, "side channel", engine.pod, "not asked from here", fix)
    elif channel.trouble is None:
        yield Finding(_OK, "side channel", engine.pod, f"answers at {channel.address}")
    elif engine.role is Role.PREFILL:
        fix = (
            "open that port (NIXL: 5600 and one for each further rank) and UCX's ephemeral ports "
            "between the pods, and set VLLM_NIXL_SIDE_CHANNEL_HOST to an address that the other "
            "side can reach"
        )
        seen = f"{channel.address}: {channel.trouble}"
        yield Finding(_BROKEN, "side channel", engine.pod, seen, fix)


def _lost(engine: Engine) -> Iterator[Finding]:
    causes = {
        metrics.ENGINE_XFER_FAILED: (
            "transfers failed",
            "check the side channel, the network and that no prefill pod was killed; "
            "loadFailurePolicy: recompute turns these into late answers",
        ),
        metrics.ENGINE_KV_EXPIRED: (
            "prompts' KV expired before it was read",
            "raise transfer.leaseDuration, or add decode pods: what is handed over waits too long",
        ),
    }
    for name, (what, fix) in causes.items():
        if count := engine.counters.get(name, 0.0):
            seen = f"{count:.0f} {what} since it started"
            yield Finding(_WARNING, "lost KV", engine.pod, seen, fix)


def _rate(engine: Engine) -> Iterator[Finding]:
    """What moved, how fast, and what a plan would have assumed."""
    moved = engine.counters.get(f"{metrics.ENGINE_XFER_BYTES}_sum", 0.0)
    seconds = engine.counters.get(f"{metrics.ENGINE_XFER_SECONDS}_sum", 0.0)
    if moved < _ENOUGH or not seconds:
        seen = (
            f"{moved / 1e6:.1f} MB of KV came to it: below {_ENOUGH / 1e6:.0f} MB it tells little"
        )
        fix = "send it more prompts that are long enough to be split, and look again"
        yield Finding(_UNKNOWN, "transfer rate", engine.pod, seen, fix)
        return
    rate, fabric = moved / seconds, _fabric(engine)
    seen = f"{moved / 1e6:.1f} MB at {rate / 1e9:.3f} GB/s over {_names(engine)}"
    if rate >= _SLOW * ASSUMED_RATE[fabric]:
        yield Finding(_OK, "transfer rate", engine.pod, seen)
        return
    wanted = f"{seen}; {ASSUMED_RATE[fabric] / 1e9:.0f} GB/s is assumed of {fabric.value}"
    yield Finding(_WARNING, "transfer rate", engine.pod, wanted, _faster(engine))


def _fabric(engine: Engine) -> Fabric:
    """The fastest that is open; unknown counts as TCP, which assumes least."""
    return max(engine.fabrics or {Fabric.TCP}, key=ASSUMED_RATE.__getitem__)


def _names(engine: Engine) -> str:
    names = sorted(f.value for f in engine.fabrics or ())
    return " and ".join(names) or "a transport that is not seen from here"


def _faster(engine: Engine) -> str:
    transports = engine.declared.environment.get("UCX_TLS", "") if engine.declared else ""
    if Fabric.RDMA not in (engine.fabrics or ()) and transports:
        return (
            f"UCX_TLS is {transports}: where there is an RDMA card, give pods its resource "
            "(transfer.rdma), let UCX_TLS include rc, and set transfer.requireRdma so that TCP is "
            "an error; short transfers stay below the rate, since the handshake dominates"
        )
    return "set transfer.bufferDevice: cuda, and placement.topologyKey so that pairs are near"


def _sidecar(sidecar: Sidecar) -> Iterator[Finding]:
    if sidecar.trouble is not None:
        fix = "kubectl logs POD -c sidecar; a restarting sidecar says why in its last line"
        yield Finding(_BROKEN, "sidecar", sidecar.pod, sidecar.trouble, fix)
        return
    if sidecar.not_ready is not None:
        fix = "a draining pod ends by itself; an engine that does not answer says why in its log"
        yield Finding(_WARNING, "sidecar", sidecar.pod, sidecar.not_ready, fix)
    total = sum(v for k, v in sidecar.counters.items() if k.startswith(f"{metrics.REQUESTS}{{"))
    fallbacks = sidecar.counters.get(metrics.FALLBACKS, 0.0)
    if total and fallbacks / total > _FALLBACKS:
        seen = f"{fallbacks:.0f} of {total:.0f} requests were to be split and were not"
        fix = "tandem trace REQUEST_ID says why of one; the log names the prefill pod that failed"
        yield Finding(_WARNING, "fallbacks", sidecar.pod, seen, fix)
    lost = sidecar.counters.get(f"{metrics.ERRORS}{{{ErrorPhase.KV_TRANSFER.value}}}", 0.0)
    if lost:
        seen = f"{lost:.0f} hand-offs whose KV did not arrive"
        fix = "see the findings of its engine and of the prefill pods on side channel and lost KV"
        yield Finding(_WARNING, "lost KV", sidecar.pod, seen, fix)


def _partners(facts: Facts) -> Iterator[Finding]:
    """Each decode engine has somebody to take KV from."""
    prefills = [e for e in facts.engines if e.role is Role.PREFILL]
    for engine in facts.engines:
        if engine.role is Role.DECODE and engine.trouble is None and _alone(engine, prefills):
            seen = "no prefill engine is paired with it: it serves requests alone"
            fix = "see what differs, above; or scale its PrefillPool up"
            yield Finding(_WARNING, "partner", engine.pod, seen, fix)


def _identities(facts: Facts) -> Iterator[Finding]:
    """Peers cache what they know by engine id: two engines must not share one."""
    seen: dict[str, str] = {}
    for engine in facts.engines:
        ident = engine.declared.transfer.get("engine_id") if engine.declared else None
        if ident is None:
            continue
        if str(ident) in seen:
            yield Finding(
                _BROKEN,
                "engine id",
                f"{seen[str(ident)]}, {engine.pod}",
                f"both have engine id {ident}",
                "give each its own in --kv-transfer-config (the operator takes the pod's uid)",
            )
        seen[str(ident)] = engine.pod


def _balance(facts: Facts) -> Iterator[Finding]:
    for group in sorted({e.group for e in facts.engines}):
        waiting, running = dict.fromkeys(Role, 0.0), dict.fromkeys(Role, 0.0)
        for engine in facts.engines:
            if engine.group == group:
                waiting[engine.role] += engine.counters.get(metrics.ENGINE_WAITING, 0.0)
                running[engine.role] += engine.counters.get(metrics.ENGINE_RUNNING, 0.0)
        for busy, idle in ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL)):
            if waiting[busy] >= _IDLE_BESIDE and not running[idle] and not waiting[idle]:
                seen = f"{waiting[busy]:.0f} requests wait for {busy.value}, {idle.value} is idle"
                fix = f"add {busy.value} replicas, or let a unified pool serve both phases"
                yield Finding(_WARNING, "balance", group, seen, fix)


def _gpus(facts: Facts) -> Iterator[Finding]:
    if facts.gpus is None:
        fix = "run tandem doctor on the node, with NVIDIA's driver, to see how its GPUs are joined"
        yield Finding(_UNKNOWN, "GPU topology", "this machine", facts.gpus_unseen, fix)
        return
    for gpu in facts.gpus:
        yield _gpu(gpu)


def _gpu(gpu: Gpu) -> Finding:
    levels = ", ".join(f"{other}: {level}" for other, level in sorted(gpu.nearness.items()))
    subject, seen = f"GPU {gpu.index}", f"{gpu.name}; to {levels or 'no other'}"
    if "across sockets" in gpu.nearness.values():
        fix = "give prefill and decode of a set GPUs of one socket, or such that NVLink joins"
        return Finding(_WARNING, "GPU topology", subject, seen, fix)
    return Finding(_OK, "GPU topology", subject, seen)
