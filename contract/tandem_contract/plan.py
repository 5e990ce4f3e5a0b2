"""`x-tandem-plan`: the EPP's routing decision, signed for the sidecar.

    v1.<key id>.<payload>.<mac>        payload: base64url JSON array; mac: HMAC-SHA256 over
                                       everything before its dot, base64url, 128 bits

Keys are the files of a directory: the file name is the key id, the content the secret. A name of
the form YYYYMMDDTHHMMSSZ is the UTC second from which its key may sign; a key with any other name
may sign at once. Among the keys that may sign, the greatest name signs (string order). All keys
verify. So a rotation loses nothing: the new key is distributed before its time, and the old key is
removed after the last plan that it signed has expired.

A plan holds at the pods that it names, and a sidecar follows it once (`security.route` there).

A prefill leg to a pod with a sidecar carries a proof of the same form, signed by the decode pod's
sidecar (`prove_prefill`): that pod's sidecar removes the transfer parameters of all requests
without one. It names one pod and one attempt, and cannot be used as a plan for a split.

Errors: `PlanRejected`: malformed, unsigned, signed with an unknown key, changed, or expired.
"""

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from .paths import RoutingPath
from .plan_mac import signed

WARM_UP: Final = "warm_up"
"""Reason of the plan for a warm-up: the first hand-off of a pair of pods, requested by the EPP
itself. The sidecar does not count it in `metrics.REQUESTS`."""

RESUME: Final = "resume"
"""Reason of the plan for the rest of a stream that another pod's engine served, made by that pod's
sidecar or a router."""

PREFILL_LEG: Final = "prefill_leg"
"""Reason of the plan that is a proof of a prefill leg."""

CLOCK_SECONDS: Final = 60.0
"""By how much the clocks of two nodes may differ: a plan is valid for so much longer."""

VERSION: Final = b"v1"
_MIN_SECRET: Final = 16
_TIME: Final = "%Y%m%dT%H%M%SZ"
_TIMED: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z")


class PlanRejected(ValueError):
    """A plan that the sidecar must not follow; the message gives the reason, not the content."""


class Target(msgspec.Struct, frozen=True, array_like=True):
    """A backend by name and by address (`host:port`)."""

    name: str
    address: str
    rank: int | None = None
    """The data-parallel rank of the engine there that serves the leg; None: the engine chooses. A
    sidecar that does not know the field ignores it."""
    asks_for_proof: bool = False
    """Whether it is a pod with a sidecar, which takes a prefill leg only with a proof. A sidecar
    that does not know the field sends none, and the hand-off falls back."""


class Timeouts(msgspec.Struct, frozen=True, array_like=True):
    """The time limits of a hand-off that the router's configuration states; in seconds."""

    prefill: float | None = None
    """For all prefill attempts together; None: the sidecar's own limit."""
    kv_transfer: float | None = None
    """For the KV transfer, and for a request that releases KV; None: the sidecar's own limit."""


NO_TIMEOUTS: Final = Timeouts()
"""The configuration states none."""


class ResumeLimits(msgspec.Struct, frozen=True, array_like=True):
    """How far other engines go on with a stream whose own failed (`tandem_sidecar.resume`)."""

    max_regeneration: float = 10.0
    """Seconds for which another engine may generate again what was delivered; more ends the stream
    with an error. Its client gets nothing meanwhile. Too high: a few long answers keep an engine
    busy with what their clients have."""
    max_moves: int = 2
    """Other engines that a stream is given to after failures. Too many: a request that crashes
    engines takes all of them with it."""


class Plan(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True):
    """The routing decision for one request."""

    path: RoutingPath
    """The intended path. The sidecar reports the actual one, which may be a fallback."""
    reason: str
    """Why this path, one of a few words: a metric label."""
    decode: Target
    """The pod this request was sent to."""
    prefill: tuple[Target, ...] = ()
    """Ordered prefill candidates; empty unless `path` is prefill_then_decode."""
    cached_tokens: int = 0
    """Prompt tokens that the decode pod has cached, by the EPP's estimate."""
    request_id: str = ""
    """The only request that the plan is valid for."""
    expires: float = 0.0
    """Unix seconds after which the plan is no longer valid."""
    timeouts: Timeouts = NO_TIMEOUTS
    """Take precedence over the sidecar's own. A sidecar that does not know the field ignores it;
    the plan of an EPP that does not know it has none."""
    alternates: tuple[Target, ...] | None = None
    """The other pods that Envoy may send the request to when `decode` fails. A sidecar refuses a
    plan that names its pod in neither. None, from an EPP that does not know the field: the plan
    holds at every pod."""
    resume: ResumeLimits | None = None
    """Asks the sidecar to let the stream go on at an alternate, even without its flag; takes
    precedence over the flags' limits. None: only with the flag. A sidecar that does not know the
    field ignores it; the plan of an EPP that does not know it has none."""
    left: Target | None = None
    """The pod that the stream leaves because it drains: the first candidate, before those of
    `prefill`, if engines of decode pods can hand off with the set's connector. It still has the KV.
    None: there is none. A sidecar that does not know the field ignores it."""
    left_plan: str = ""
    """The MAC of the plan by which `left` serves the stream, so that its sidecar knows which one
    leaves: clients' own request ids may repeat. Empty: its engine serves it no more."""


decode_plan: Final = msgspec.json.Decoder(Plan).decode
encode_plan: Final = msgspec.json.Encoder().encode


def load_keys(directory: Path) -> dict[str, bytes]:
    """Key id → secret, from the files of `directory`.

    Hidden files are skipped: Kubernetes uses them to update a mounted Secret atomically.

    Raises ValueError naming the file when a secret is shorter than 16 bytes or an id has a dot.
    """
    keys = {}
    for file in sorted(directory.iterdir()):
        # Kubernetes mounts a Secret with links like `..data`, which are not keys.
        if file.name.startswith(".") or not file.is_file():
            continue
        # A text editor or `echo` adds a newline, which both sides must ignore.
        secret = file.read_bytes().strip()
        if len(secret) < _MIN_SECRET:
            raise ValueError(
                f"{file}: a plan key is at least {_MIN_SECRET} bytes, this has {len(secret)}"
            )
        if "." in file.name:
            raise ValueError(f"{file}: a plan key's file name is its id and may hold no dot")
        keys[file.name] = secret
    return keys


def key_id(when: float) -> str:
    """Id of a key that may sign from `when` (Unix seconds) on."""
    return datetime.fromtimestamp(when, UTC).strftime(_TIME)


def signs_from(key_id: str) -> float | None:
    """Unix seconds from which a key may sign; None: its id is not a time, it may sign at once."""
    if _TIMED.fullmatch(key_id) is None:
        return None
    try:
        return datetime.strptime(key_id, _TIME).replace(tzinfo=UTC).timestamp()
    except ValueError:
        return None


def signing_key(keys: Mapping[str, bytes], now: float) -> str:
    """Id of the key that signs at `now` (Unix seconds).

    If the time of every key is in the future (the clock that named them is ahead of ours), the
    earliest key signs: it has been distributed longest. Raises ValueError without any key.
    """
    if not keys:
        raise ValueError("no plan key to sign with")
    current = key_id(now)
    # Ids of this form compare as text in the order of their times.
    usable = [name for name in keys if name <= current or _TIMED.fullmatch(name) is None]
    return max(usable) if usable else min(keys)


def sign(plan: Plan, keys: Mapping[str, bytes], *, now: float) -> str:
    """The header value, signed with the key that signs at `now` (Unix seconds). For many plans
    `PlanSigner.sign` does the same faster. Raises ValueError without any key."""
    key_id = signing_key(keys, now)
    return signed(plan_head(key_id), encode_plan(plan), keys[key_id])


def mac_of(header: str) -> str:
    """The MAC of a plan, which no two plans share."""
    return header.rpartition(".")[2]


def plan_head(key_id: str) -> bytes:
    """The beginning of a header whose plan is signed with this key."""
    return b"%b.%b." % (VERSION, key_id.encode())


def prove_prefill(
    target: Target,
    attempt_id: str,
    keys: Mapping[str, bytes],
    *,
    now: float,
    seconds: float,
    left_plan: str = "",
) -> str:
    """The proof, valid for `seconds`, that the request `attempt_id` is a prefill leg for `target`.

    `left_plan`: as of `Plan`, if it is of a stream that leaves `target`. Raises ValueError without
    any key.
    """
    # As a plan it would say: unified. So it splits nothing if it is sent to a decode pod.
    proof = Plan(
        RoutingPath.UNIFIED,
        PREFILL_LEG,
        target,
        request_id=attempt_id,
        expires=now + seconds,
        left_plan=left_plan,
    )
    return sign(proof, keys, now=now)
