"""Checks whether the pods of a set prove to each other that they belong to it. Pure."""

from collections.abc import Iterator
from typing import Final

from tandem_contract.paths import Role

from .facts import Engine, Sidecar
from .findings import Finding, Severity

TRANSFER_KEYS: Final = "transfer-key-dir"
"""The reference engine's flag, as in `EngineCommand.flags`."""
_NO_TRANSFER_KEYS: Final = (
    "give all reference engines of the set --transfer-key-dir with the same keys; pods of the "
    "operator have it once they are made anew (kubectl annotate prefillpool,decodepool NAME "
    "tandem.dev/restartedAt=NOW); until then let network policies decide who reaches the port"
)


def check_engine_keys(engine: Engine) -> Iterator[Finding]:
    """A reference engine without transfer keys."""
    if has_transfer_keys(engine) is False and engine.role is not Role.UNIFIED:
        detail = "without transfer keys: any process that reaches its KV transfer port may read KV"
        yield Finding(Severity.WARNING, "keys", engine.pod, detail, _NO_TRANSFER_KEYS)


def check_pair_keys(prefill: Engine, decode: Engine) -> Iterator[Finding]:
    """Engines of which only one has transfer keys: they refuse each other."""
    with_keys = [has_transfer_keys(prefill), has_transfer_keys(decode)]
    if None not in with_keys and len({*with_keys}) > 1:
        keyless = decode if with_keys[0] else prefill
        detail = f"{keyless.pod} alone has no transfer keys: the engines refuse each other's KV"
        subject = f"{prefill.pod}, {decode.pod}"
        yield Finding(Severity.BROKEN, "keys", subject, detail, _NO_TRANSFER_KEYS)


def check_sidecar_keys(sidecar: Sidecar) -> Iterator[Finding]:
    """A sidecar that follows unsigned choices of a prefill pod."""
    if sidecar.has_plan_keys is False:
        detail = (
            "without plan keys: any client that reaches its port chooses the prefill pod, within "
            "--prefill-allow"
        )
        fix = (
            "start it with --plan-key-dir and the EPP's keys (the operator does, unless "
            "routing.epp.enabled is false), or let only the router reach it"
        )
        yield Finding(Severity.WARNING, "keys", sidecar.pod, detail, fix)


def has_transfer_keys(engine: Engine) -> bool | None:
    """None for an engine of another kind, without a transfer port, or that is not visible."""
    command = engine.command
    if command is None or not command.is_reference or not command.kv_transfer_config:
        return None
    return TRANSFER_KEYS in command.flags
