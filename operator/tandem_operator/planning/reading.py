"""A set as the API server holds it → each pool as a type, or what keeps it back.

The API server has checked each object against its schema and rules. What takes two objects is
checked here; and since an object may be older than its schema, one that cannot be read is its own
pool's fault and nobody else's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from tandem_contract import labels

from ..conditions import Reason
from ..crd import DECODE_POOL, PREFILL_POOL
from ..observed import Body
from ..resources.agree import disagreements, replicated_heads_note
from ..resources.inherit import inherit
from ..resources.members import DecodePool, Pool, PrefillPool, Written, decode_pool, prefill_pool
from ..resources.resolve import DEFAULTS, Defaults
from ..resources.schema import defaulted_spec
from ..resources.versions import refusals
from ..resources.words import contradiction, refused
from .rollout import limits

T = TypeVar("T")

_UNREADABLE: Final = (
    msgspec.MsgspecError, AttributeError, IndexError, KeyError, TypeError, ValueError,
)  # fmt: skip
"""What reading a body of another shape than its schema's ends in."""


@dataclass(frozen=True)
class Held:
    """Why a pool keeps the revision it has."""

    reason: Reason
    """InvalidSpec, PeerMissing, PeerUnreadable or Mismatch."""
    faults: tuple[str, ...]
    """One line each: field, both values and the fix."""

    @property
    def message(self) -> str:
        return "; ".join(self.faults)


@dataclass(frozen=True)
class Reading:
    """One pool, as far as it can be read."""

    pool: Pool | None
    """Typed even when it disagrees with its peer; None when it cannot be read, or not without a
    peer that is missing."""
    held: Held | None = None
    """None when the pool may roll."""
    replicas: int | None = None
    """Pods wanted; known even of a pool that waits for its peer's fields."""
    paused: bool = False
    notes: tuple[str, ...] = ()
    """What cannot be checked here and should be known."""


@dataclass(frozen=True)
class SetReading:
    """A set, pool by pool."""

    prefill: Reading | None
    """None when there is no PrefillPool."""
    decodes: Mapping[str, Reading] = field(default_factory=dict)
    """By name."""


@dataclass(frozen=True)
class _Spec:
    written: Written
    replicas: int
    paused: bool


def read_set(
    prefill: Body | None, decodes: Sequence[Body], defaults: Defaults = DEFAULTS
) -> SetReading:
    """Read the objects of a set: its PrefillPool, if there is one, and DecodePools.

    Never raises. A DecodePool that names a PrefillPool is taken to name this one. `prefill` None
    says that it does not exist. Bodies that nobody edited give the very same readings again.
    """
    above = _Read(prefill, None, defaults) if prefill is not None else None
    return SetReading(
        prefill=_prefill(above) if above is not None else None,
        decodes={_name(body): _decode(_Read(body, prefill, defaults)) for body in decodes},
    )


def attempt_pods(reading: Reading, make: Callable[[Pool], object]) -> Reading:
    """The reading, held when no pods can be made of it: a template may say what no merge takes."""
    pool = reading.pool
    if pool is None or reading.held is not None:
        return reading
    made = _attempt(lambda: make(pool))
    return replace(reading, held=made) if isinstance(made, Held) else reading


class _Read:
    """What a reading depends on, as a key: objects by uid, generation and what annotations say."""

    def __init__(self, body: Body, above: Body | None, defaults: Defaults) -> None:
        self.body, self.above, self.defaults = body, above, defaults
        self._key = (_edit(body), None if above is None else _edit(above), defaults)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Read) and self._key == other._key


def _edit(body: Body) -> tuple[object, ...]:
    """Equal for two bodies of one object whose spec nobody changed in between."""
    metadata = body["metadata"]
    uid, generation = metadata.get("uid"), metadata.get("generation")
    if not uid or not generation:
        return (object(),)
    restarted = (metadata.get("annotations") or {}).get(labels.RESTARTED_AT)
    return (uid, generation, restarted, tuple(sorted((metadata.get("labels") or {}).items())))


@lru_cache(maxsize=512)
def _prefill(read: _Read) -> Reading:
    return _read_prefill(_attempt(lambda: _spec(PREFILL_POOL, read.body)), read.defaults)


@lru_cache(maxsize=2048)
def _decode(read: _Read) -> Reading:
    above = read.above
    found = _attempt(lambda: _spec(PREFILL_POOL, above)) if above is not None else None
    return _read_decode(read.body, found, read.defaults)


def _read_prefill(above: "_Spec | Held", defaults: Defaults) -> Reading:
    if isinstance(above, Held):
        return Reading(None, above)
    return _typed(above, lambda: prefill_pool(above.written, defaults))


def _read_decode(body: Body, above: "_Spec | Held | None", defaults: Defaults) -> Reading:
    found = _attempt(lambda: _spec(DECODE_POOL, body))
    if isinstance(found, Held):
        return Reading(None, found)
    reference = found.written.spec.get("prefillRef")
    if reference is None:
        return _typed(found, lambda: decode_pool(found.written, defaults))
    if isinstance(above, _Spec):
        return _read_pair(found, above, defaults)
    if above is None:
        held = Held(
            Reason.PEER_MISSING,
            (f"there is no PrefillPool {reference.get('name')} in this namespace: create it, or"
             " change spec.prefillRef.name",),
        )  # fmt: skip
    else:
        held = Held(
            Reason.PEER_UNREADABLE,
            (f"PrefillPool {reference.get('name')} cannot be read: see its condition Stalled",),
        )
    return Reading(None, held, found.replicas, found.paused)


def _read_pair(found: _Spec, above: _Spec, defaults: Defaults) -> Reading:
    """A DecodePool with its PrefillPool's fields."""
    own, theirs = found.written, above.written
    merged = _attempt(lambda: inherit(theirs.spec, own.spec))
    if isinstance(merged, Held):
        return Reading(None, merged)
    whole = replace(own, spec=merged)
    reading = _typed(
        _Spec(whole, found.replicas, found.paused), lambda: decode_pool(whole, defaults)
    )
    if reading.held is not None:
        return reading
    differ = _attempt(lambda: tuple(disagreements(theirs.spec, own.spec, merged, defaults)))
    if isinstance(differ, Held):
        return Reading(None, differ)
    names = f"DecodePool {own.name}", f"PrefillPool {theirs.name}"
    lines = tuple(contradiction(one, *names) for one in differ)
    lines += tuple(_broken_with_inherited(reading.pool))
    held = Held(Reason.MISMATCH, lines) if lines else None
    peer = _attempt(lambda: prefill_pool(theirs, defaults))
    notes = () if isinstance(peer, Held) else tuple(_notes(peer, reading.pool))
    return Reading(reading.pool, held, found.replicas, found.paused, notes)


def _notes(prefill: PrefillPool, decode: Pool | None) -> Sequence[str]:
    sizes = prefill.spec.parallelism.tensor, decode.spec.parallelism.tensor if decode else 0
    note = replicated_heads_note(*sizes) if decode else None
    return [note] if note else []


def _broken_with_inherited(pool: Pool | None) -> Sequence[str]:
    """The CRD's rules that a DecodePool can break only with what it inherits."""
    if not isinstance(pool, DecodePool) or pool.spec.engine.type != "torch":
        return ()
    sizes = pool.spec.parallelism
    if sizes.tensor * sizes.pipeline * sizes.data > 1 or pool.spec.accelerator.count > 1:
        return (
            "the torch engine, inherited, runs on one device: leave parallelism and"
            " accelerator.count out",
        )
    return ()


def _typed(found: _Spec, make: Callable[[], Pool]) -> Reading:
    def whole() -> tuple[Pool, tuple[str, ...]]:
        pool = make()
        limits(pool.spec.rollout, found.replicas)
        return pool, tuple(refused(problem) for problem in refusals(pool.spec))

    made = _attempt(whole)
    if isinstance(made, Held):
        return Reading(None, made, found.replicas, found.paused)
    pool, lines = made
    held = Held(Reason.INVALID_SPEC, lines) if lines else None
    return Reading(pool, held, found.replicas, found.paused)


def _spec(kind: str, body: Body) -> _Spec:
    metadata = body["metadata"]
    spec = defaulted_spec(kind, body["spec"])
    annotations = metadata.get("annotations") or {}
    labels = metadata.get("labels") or {}
    written = Written(kind, metadata["name"], metadata["namespace"], spec, annotations, labels)
    return _Spec(written, _replicas(spec), bool(spec.get("paused")))


def _replicas(spec: Mapping[str, Any]) -> int:
    """`replicas`, else scaling's fewest, else one."""
    replicas = spec.get("replicas")
    if replicas is None:
        replicas = (spec.get("scaling") or {}).get("minReplicas", 1)
    if type(replicas) is not int or replicas < 0:
        raise ValueError(f"replicas is {replicas!r}: a number of pods is wanted")
    return replicas


def _name(body: Body) -> str:
    return str(body["metadata"]["name"])


def _attempt(read: Callable[[], T]) -> "T | Held":
    try:
        return read()
    except _UNREADABLE as err:
        return Held(Reason.INVALID_SPEC, (_told(err),))


def _told(err: Exception) -> str:
    if isinstance(err, KeyError):
        return (
            f"the object lacks {err.args[0]!r}: apply it again with this release's CRDs installed"
        )
    return f"the object cannot be read: {err}"
