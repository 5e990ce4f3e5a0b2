"""The members of a set as types: what `pools` makes of custom resources.

A pool here is valid by itself, with everything it inherits, and every field is chosen.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NewType

from tandem_contract import labels
from tandem_contract.paths import Role

from ..crd import DECODE_POOL, PREFILL_POOL
from .agree import compat_facts
from .canonical import short_hash, stated
from .resolve import Defaults, resolve
from .spec import DecodeSpec, PrefillSpec, typed

Revision = NewType("Revision", str)
CompatHash = NewType("CompatHash", str)

_NOT_IN_TEMPLATE: Final = frozenset(
    {"replicas", "scaling", "rollout", "paused", "routing", "prefillRef"}
)


@dataclass(frozen=True)
class _Pool:
    name: str
    namespace: str
    revision: Revision
    """Hash of what the user wrote about the pods; how many there are is no part of it."""
    compat: CompatHash
    """Hash of what both sides of a hand-off must share."""
    queueing: Mapping[str, str]
    """Labels of the object that are its pods' as well: Kueue's."""


@dataclass(frozen=True)
class PrefillPool(_Pool):
    """Pods that prefill."""

    spec: PrefillSpec

    @property
    def role(self) -> Role:
        return Role.PREFILL


@dataclass(frozen=True)
class DecodePool(_Pool):
    """Pods that decode, or do both."""

    spec: DecodeSpec

    @property
    def role(self) -> Role:
        return self.spec.role


Pool = PrefillPool | DecodePool


@dataclass(frozen=True)
class PoolSet:
    """A PrefillPool and every DecodePool naming it; or one unified DecodePool alone."""

    prefill: PrefillPool | None
    decodes: tuple[DecodePool, ...]

    @property
    def name(self) -> str:
        """The PrefillPool's name, or that of the pool that stands alone."""
        return self.prefill.name if self.prefill else self.decodes[0].name

    @property
    def pools(self) -> tuple[Pool, ...]:
        return (*((self.prefill,) if self.prefill else ()), *self.decodes)


Pools = tuple[PoolSet, ...]


@dataclass(frozen=True)
class Written:
    """A pool's object as far as a pool is made from it."""

    kind: str
    name: str
    namespace: str
    spec: Mapping[str, Any]
    """With the schema's defaults, and with what is inherited."""
    annotations: Mapping[str, str]
    labels: Mapping[str, str]


def prefill_pool(written: Written, defaults: Defaults) -> PrefillPool:
    """Raises msgspec.ValidationError, KeyError, TypeError or ValueError for a spec that breaks the
    schema."""
    spec = resolve(PREFILL_POOL, written.name, written.spec, defaults)
    return PrefillPool(
        written.name, written.namespace, _revision(written, {}), _compat(spec), _queueing(written),
        typed(spec, PrefillSpec),
    )  # fmt: skip


def decode_pool(written: Written, defaults: Defaults) -> DecodePool:
    """The same of a DecodePool."""
    spec = resolve(DECODE_POOL, written.name, written.spec, defaults)
    routing = spec["routing"]
    read_by_pods = {"endpoint": routing["endpoint"], "epp": routing["epp"]["enabled"]}
    return DecodePool(
        written.name, written.namespace, _revision(written, read_by_pods), _compat(spec),
        _queueing(written), typed(spec, DecodeSpec),
    )  # fmt: skip


def as_revision(pool: Pool, revision: str) -> Pool:
    """The pool under another revision than that of its own hash."""
    return replace(pool, revision=Revision(revision))


def _revision(written: Written, more: Mapping[str, Any]) -> Revision:
    user = stated(written.kind, written.spec)
    spec = {key: value for key, value in user.items() if key not in _NOT_IN_TEMPLATE}
    restarted = written.annotations.get(labels.RESTARTED_AT)
    again = {"restartedAt": restarted} if restarted else {}
    queue = {"queueing": queueing} if (queueing := _queueing(written)) else {}
    return Revision(short_hash({"kind": written.kind, "spec": spec, **more, **again, **queue}))


def _queueing(written: Written) -> dict[str, str]:
    return {k: v for k, v in written.labels.items() if k.startswith(labels.KUEUE_PREFIX)}


def _compat(spec: Mapping[str, Any]) -> CompatHash:
    return CompatHash(short_hash(compat_facts(spec)))
