"""Checks of the TCP ports at which UCX takes connections of other engines. Pure."""

from collections.abc import Iterator
from typing import Final

from tandem_contract import environment, ports

from .facts import Engine, EngineCommand, MachinePorts
from .findings import Finding, Severity

CHECK: Final = "data ports"
_UCX_TRANSPORTS: Final = "UCX_TLS"
"""The operator sets it for every engine with UCX; the reference engine has none."""
_FEWEST_FREE: Final = 16
"""A pod of eight GPUs takes one port for each device and worker process."""
_FIX_FIELD: Final = "set transfer.dataPorts in the PrefillPool"


def parse_range(text: str) -> range | None:
    """The ports of `FIRST-LAST` or `PORT`, as UCX reads them; None if it is neither."""
    first, dash, last = text.partition("-")
    if not first.isdecimal() or not (last if dash else first).isdecimal():
        return None
    ends = range(int(first), int(last or first) + 1)
    return ends if ends and ends.stop <= ports.LAST + 1 else None


def check_data_ports(engine: Engine, machine: MachinePorts | None) -> Iterator[Finding]:
    """Findings on the range of one engine; `machine`: None if it runs on another machine."""
    if engine.command is None or not engine.command.kv_transfer_config:
        return
    text = engine.command.environment.get(environment.DATA_PORTS, "0")
    if text == "0":
        if _UCX_TRANSPORTS in engine.command.environment:
            detail = f"no {environment.DATA_PORTS}: UCX listens on ports that the kernel chooses"
            fix = (
                "open the ephemeral ports between the pods, or replace pods that an earlier "
                "operator made: kubectl annotate the pools with tandem.dev/restartedAt"
            )
            yield Finding(Severity.WARNING, CHECK, engine.pod, detail, fix)
        return
    allowed = parse_range(text)
    if allowed is None:
        detail = f"{environment.DATA_PORTS}={text} is no range of ports"
        yield Finding(Severity.BROKEN, CHECK, engine.pod, detail, _FIX_FIELD)
        return
    problems = [
        *_overlaps(engine.command, allowed),
        *(_machine_problems(allowed, machine) if machine else ()),
    ]
    yield from (Finding(s, CHECK, engine.pod, detail, fix) for s, detail, fix in problems)
    if engine.data_port_error is not None:
        yield _closed(engine, text, engine.data_port_error)
    elif not problems:
        listening = "" if engine.listening is None else _listening(engine.listening, allowed)
        yield Finding(Severity.OK, CHECK, engine.pod, f"UCX may listen at {text}{listening}")


def _overlaps(command: EngineCommand, allowed: range) -> Iterator[tuple[Severity, str, str]]:
    """The engine's own servers that listen within the range."""
    side_channel = command.environment.get(environment.SIDE_CHANNEL_PORT, "")
    used = {
        "the engine": command.flags.get("port", ""),
        "the side channel": side_channel or str(ports.SIDE_CHANNEL),
        "KV events": str(ports.KV_EVENTS),
        "the replay of KV events": str(ports.KV_EVENTS_REPLAY),
        "the sidecar": str(ports.SIDECAR),
        "the sidecar's admin port": str(ports.SIDECAR_ADMIN),
    }
    for server, port in used.items():
        if port.isdecimal() and int(port) in allowed:
            detail = f"{_text(allowed)} includes {port}, the port of {server}"
            yield Severity.WARNING, detail, f"{_FIX_FIELD} to a range without it"


def _machine_problems(allowed: range, machine: MachinePorts) -> Iterator[tuple[Severity, str, str]]:
    first, last = machine.ephemeral
    if allowed.start <= last and first < allowed.stop:
        detail = (
            f"{_text(allowed)} overlaps the ephemeral ports {first}-{last} of this machine: its "
            "outgoing connections may take a port before UCX does"
        )
        yield Severity.WARNING, detail, f"{_FIX_FIELD} to a range below {first}"
    # Engines of other pods on this machine use the same range.
    free = len(allowed) - len(machine.in_use.intersection(allowed))
    if free < _FEWEST_FREE:
        severity = Severity.WARNING if free else Severity.BROKEN
        detail = f"{free} of the {len(allowed)} ports of {_text(allowed)} are free on this machine"
        yield severity, detail, f"{_FIX_FIELD} to a larger range"


def _closed(engine: Engine, text: str, error: str) -> Finding:
    # NetworkPolicies let in the pods of the set only, and the doctor is none of them.
    fix = (
        f"open the TCP ports {text} between the pods of the set in firewalls; a NetworkPolicy of "
        "Tandem opens them to these pods only, and not to the pod in which tandem doctor runs"
    )
    return Finding(Severity.UNKNOWN, CHECK, engine.pod, f"{text}: {error} from here", fix)


def _listening(listening: frozenset[int], allowed: range) -> str:
    inside = sorted(listening.intersection(allowed))
    return f", and listens at {', '.join(map(str, inside[:4]))}" if inside else ""


def _text(allowed: range) -> str:
    return f"{allowed.start}-{allowed.stop - 1}"
