"""The pools of a set as the API server has them: each as a type, or why it is rejected.

    validate_set(prefill, decodes) -> SetValidation

The API server has checked each object against its CRD. Checks that need two objects are made here.
An object may be older than the CRD it is read with, so one that cannot be read is rejected alone:
the other pools of the set go on.

Results are cached by uid, generation, spec and the metadata that pods depend on: a pass over an
unchanged set returns the same objects again, on whose identity `revisions.render_template` caches.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec

from tandem_contract import labels
from tandem_contract.custom_resources import DECODE_POOL, PREFILL_POOL

from ..conditions import Reason
from ..observed import Body
from ..resources.compatibility import (
    disagreements,
    inherit,
    is_inherited,
    priority_note,
    replicated_heads_note,
)
from ..resources.pools import (
    DecodePool,
    Pool,
    PoolManifest,
    PrefillPool,
    decode_pool,
    prefill_pool,
)
from ..resources.resolve import DEFAULTS, Defaults, without_inert_fields
from ..resources.schema import Problem, defaulted_spec
from ..resources.vllm_versions import unsupported_settings
from .rollout import limits

T = TypeVar("T")

_UNREADABLE: Final = (
    msgspec.MsgspecError, AttributeError, IndexError, KeyError, TypeError, ValueError,
)  # fmt: skip
"""Errors that a body of another shape than its schema's can cause."""


@dataclass(frozen=True)
class Rejection:
    """Why a pool keeps its present revision."""

    reason: Reason
    """InvalidSpec, PeerMissing, PeerUnreadable or Mismatch."""
    faults: tuple[str, ...]
    """One line each: field, both values and the fix."""

    @property
    def message(self) -> str:
        return "; ".join(self.faults)


@dataclass(frozen=True)
class PoolValidation:
    """One pool, as far as it can be read."""

    pool: Pool | None
    """Set even when the pool disagrees with its peer; None when it cannot be read, or not without
    the fields of a peer that is missing."""
    rejection: Rejection | None = None
    """None: the pool may roll."""
    replicas: int | None = None
    """Desired number of pods; None when the spec has no readable one."""
    paused: bool = False
    notes: tuple[str, ...] = ()
    """Limits that cannot be checked here and that the user should know."""


@dataclass(frozen=True)
class SetValidation:
    """A set, pool by pool."""

    prefill: PoolValidation | None
    """None when there is no PrefillPool."""
    decodes: Mapping[str, PoolValidation] = field(default_factory=dict)
    """By name."""


@dataclass(frozen=True)
class _Manifest:
    """A custom resource whose spec has the expected shape."""

    pool: PoolManifest
    replicas: int | None
    paused: bool


def validate_set(
    prefill: Body | None, decodes: Sequence[Body], defaults: Defaults = DEFAULTS
) -> SetValidation:
    """Validate the objects of a set: its PrefillPool (None: it does not exist) and DecodePools.

    Never raises. Every DecodePool with a `prefillRef` must name this PrefillPool.
    """
    prefill_request = _Request(prefill, None, defaults) if prefill is not None else None
    return SetValidation(
        prefill=_validate_prefill(prefill_request) if prefill_request is not None else None,
        decodes={
            str(body["metadata"]["name"]): _validate_decode(_Request(body, prefill, defaults))
            for body in decodes
        },
    )


def check_renderable(
    validation: PoolValidation, render: Callable[[Pool], object]
) -> PoolValidation:
    """The validation, rejected when `render` fails: a template may hold what cannot be merged."""
    pool = validation.pool
    if pool is None or validation.rejection is not None:
        return validation
    # No schema checks the content of `template`.
    result = _attempt(lambda: render(pool))
    return replace(validation, rejection=result) if isinstance(result, Rejection) else validation


class _Request:
    """Input of a validation, as a cache key: two are equal when nothing it depends on changed.

    The specs are compared, too: after etcd was restored to an older state, a generation comes a
    second time with another spec.
    """

    def __init__(self, body: Body, prefill: Body | None, defaults: Defaults) -> None:
        self.body, self.prefill, self.defaults = body, prefill, defaults
        self._key = (_version(body), None if prefill is None else _version(prefill), defaults)

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Request) and self._key == other._key and self._specs == other._specs
        )

    @property
    def _specs(self) -> tuple[object, ...]:
        return self.body.get("spec"), None if self.prefill is None else self.prefill.get("spec")


def _version(body: Body) -> tuple[object, ...]:
    """Unequal for two bodies of one object when its pods may have to change.

    The generation grows with every change of the spec, but not of annotations and labels, two of
    which are part of the pods.
    """
    metadata = body["metadata"]
    uid, generation = metadata.get("uid"), metadata.get("generation")
    # Objects without identity (tests, dry runs) are never equal, so they are not cached.
    if not uid or not generation:
        return (object(),)
    restarted = (metadata.get("annotations") or {}).get(labels.RESTARTED_AT)
    return (uid, generation, restarted, tuple(sorted((metadata.get("labels") or {}).items())))


@lru_cache(maxsize=512)
def _validate_prefill(request: _Request) -> PoolValidation:
    manifest = _attempt(lambda: _read_manifest(PREFILL_POOL, request.body))
    if isinstance(manifest, Rejection):
        return _unreadable(request.body, manifest)
    return _to_pool(manifest, lambda: prefill_pool(manifest.pool, request.defaults))


@lru_cache(maxsize=2048)
def _validate_decode(request: _Request) -> PoolValidation:
    manifest = _attempt(lambda: _read_manifest(DECODE_POOL, request.body))
    if isinstance(manifest, Rejection):
        return _unreadable(request.body, manifest)
    name = _attempt(lambda: _peer_name(manifest))
    if isinstance(name, Rejection):
        return _unreadable(request.body, name)
    if name is None:
        return _to_pool(manifest, lambda: decode_pool(manifest.pool, request.defaults))
    # Without a readable PrefillPool the inherited fields are unknown, so there is no typed pool;
    # replicas and `paused` are the DecodePool's own and still apply.
    body = request.prefill
    if body is None:
        rejection = Rejection(
            Reason.PEER_MISSING,
            (f"there is no PrefillPool {name} in this namespace: create it, or"
             " change spec.prefillRef.name",),
        )  # fmt: skip
        return PoolValidation(None, rejection, manifest.replicas, manifest.paused)
    # Read here again, because this DecodePool's result depends on the PrefillPool's spec.
    prefill = _attempt(lambda: _read_manifest(PREFILL_POOL, body))
    if isinstance(prefill, Rejection):
        rejection = Rejection(
            Reason.PEER_UNREADABLE,
            (f"PrefillPool {name} cannot be read: see its condition Stalled",),
        )
        return PoolValidation(None, rejection, manifest.replicas, manifest.paused)
    return _validate_pair(manifest, prefill, request.defaults)


def _validate_pair(decode: _Manifest, prefill: _Manifest, defaults: Defaults) -> PoolValidation:
    """A DecodePool with the fields that it inherits from its PrefillPool."""
    own, peer = decode.pool, prefill.pool
    merged = _attempt(lambda: inherit(peer.spec, own.spec))
    if isinstance(merged, Rejection):
        return PoolValidation(None, merged, decode.replicas, decode.paused)
    # The DecodePool with inherited fields must be valid by itself before the pair is compared.
    complete = replace(own, spec=merged)
    validation = _to_pool(
        replace(decode, pool=complete),
        lambda: decode_pool(complete, defaults),
        lambda problem: _inherited_problem_line(problem, peer, own),
    )
    if validation.rejection is not None:
        return validation
    differences = _attempt(lambda: tuple(disagreements(peer.spec, own.spec, merged, defaults)))
    if isinstance(differences, Rejection):
        return PoolValidation(None, differences, decode.replicas, decode.paused)
    names = f"DecodePool {own.name}", f"PrefillPool {peer.name}"
    faults = tuple(mismatch.message(*names) for mismatch in differences)
    faults += tuple(_rules_broken_by_inheritance(validation.pool, peer.name))
    rejection = Rejection(Reason.MISMATCH, faults) if faults else None
    # A peer that cannot be typed is reported on its own object; only the notes are left out here.
    typed_peer = _attempt(lambda: prefill_pool(peer, defaults))
    notes = () if isinstance(typed_peer, Rejection) else tuple(_notes(typed_peer, validation.pool))
    return PoolValidation(validation.pool, rejection, decode.replicas, decode.paused, notes)


def _notes(prefill: PrefillPool, decode: Pool | None) -> Sequence[str]:
    if decode is None:
        return []
    specs = prefill.spec, decode.spec
    notes = (
        replicated_heads_note(*(spec.parallelism.tensor for spec in specs)),
        priority_note(*(spec.engine.extra_args for spec in specs)),
    )
    return [note for note in notes if note]


def _rules_broken_by_inheritance(pool: Pool | None, prefill: str) -> Sequence[str]:
    """The CRD's rules that a DecodePool can break only together with inherited fields."""
    # The API server checks an object as written, without the inherited fields.
    if not isinstance(pool, DecodePool) or pool.spec.engine.type != "torch":
        return ()
    sizes = pool.spec.parallelism
    if sizes.tensor * sizes.pipeline * sizes.data > 1 or pool.spec.accelerator.count > 1:
        return (
            f"the torch engine, inherited from PrefillPool {prefill}, runs on one device: leave"
            " parallelism and accelerator.count out",
        )
    return ()


def _problem_line(problem: Problem) -> str:
    """Field and fix; the path of the field begins below `spec`."""
    return f"{'.'.join(str(step) for step in problem.path[1:])}: {problem.message}"


def _to_pool(
    manifest: _Manifest,
    make: Callable[[], Pool],
    line: Callable[[Problem], str] = _problem_line,
) -> PoolValidation:
    def checked() -> tuple[Pool, tuple[str, ...]]:
        pool = make()
        # Raises when a percentage of the rollout is malformed.
        limits(pool.spec.rollout, manifest.replicas or 1)
        return pool, tuple(line(p) for p in unsupported_settings(pool.spec))

    result = _attempt(checked)
    if isinstance(result, Rejection):
        return PoolValidation(None, result, manifest.replicas, manifest.paused)
    pool, faults = result
    rejection = Rejection(Reason.INVALID_SPEC, faults) if faults else None
    return PoolValidation(pool, rejection, manifest.replicas, manifest.paused)


def _inherited_problem_line(problem: Problem, prefill: PoolManifest, decode: PoolManifest) -> str:
    """The line of a DecodePool's problem; it names the PrefillPool that alone has the setting."""
    line = _problem_line(problem)
    if not is_inherited(problem.path[1:], prefill.spec, decode.spec):
        return line
    return f"{line} (inherited from PrefillPool {prefill.name})"


def _read_manifest(kind: str, body: Body) -> _Manifest:
    metadata = body["metadata"]
    spec = without_inert_fields(defaulted_spec(kind, body["spec"]))
    annotations = metadata.get("annotations") or {}
    own_labels = metadata.get("labels") or {}
    name, namespace = metadata["name"], metadata["namespace"]
    pool = PoolManifest(kind, name, namespace, spec, annotations, own_labels)
    return _Manifest(pool, _replicas(spec), bool(spec.get("paused")))


def _unreadable(body: Body, rejection: Rejection) -> PoolValidation:
    """A custom resource that cannot be read as a whole: its number of pods still applies."""
    replicas = _attempt(lambda: _replicas(body["spec"]))
    return PoolValidation(None, rejection, None if isinstance(replicas, Rejection) else replicas)


def _peer_name(decode: _Manifest) -> str | None:
    """The PrefillPool that a DecodePool names; None: it has no `prefillRef`."""
    reference = decode.pool.spec.get("prefillRef")
    return None if reference is None else str(reference.get("name"))


def _replicas(spec: Mapping[str, Any]) -> int | None:
    """`scaling.minReplicas`, else `replicas`; None without either."""
    scaling = spec.get("scaling")
    # `replicas` beside `scaling` is a leftover: see the rule in the CRDs.
    replicas = spec.get("replicas") if scaling is None else scaling.get("minReplicas", 1)
    if replicas is None:
        return None
    if type(replicas) is not int or replicas < 0:
        raise ValueError(f"replicas is {replicas!r}: expected a number of pods, 0 or more")
    return replicas


def _attempt(read: Callable[[], T]) -> "T | Rejection":
    """The result of `read`; a rejection when the object has another shape than its schema."""
    try:
        return read()
    except _UNREADABLE as err:
        return Rejection(Reason.INVALID_SPEC, (_explain(err),))


def _explain(err: Exception) -> str:
    if isinstance(err, KeyError):
        return (
            f"the object lacks {err.args[0]!r}: apply it again with this release's CRDs installed"
        )
    return f"the object cannot be read: {err}"
