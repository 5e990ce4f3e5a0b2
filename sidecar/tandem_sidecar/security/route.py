"""Decides the routing path of a request, and which prefill pods it may use, from its headers.

    keys, valid plan                        the plan's path and prefill pods
    keys, bad plan or unsigned header       unified, and an orchestration error: nothing is trusted
    bad plan for the rest of a stream       refused: the client would get the answer's begin twice
    no keys, header inside the allow-list   prefill_then_decode
    anything else                           unified

Keys, allow-list, time and the table of used plans are arguments; `security.credentials` reads the
keys.
"""

import ipaddress
import mmap
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from struct import Struct
from typing import Final
from zlib import crc32

import msgspec

from tandem_contract import headers
from tandem_contract.commandline import HostPort, parse_host_port
from tandem_contract.paths import RoutingPath
from tandem_contract.plan import (
    NO_TIMEOUTS,
    Plan,
    PlanRejected,
    ResumeLimits,
    Target,
    Timeouts,
    mac_of,
)
from tandem_contract.plan_verification import says_resume, verify, verify_proof
from tandem_http1.messages import Request

UNROUTED: Final = "unrouted"
"""Reason when no header names a prefill pod."""
NOT_TRUSTED: Final = "not_trusted"
"""Reason when a header names a prefill pod and cannot be trusted."""
SPLIT: Final = RoutingPath.PREFILL_THEN_DECODE
"""Looked up once: see `observability.observer`."""

_PLAN: Final = headers.PLAN.encode()
PROOF: Final = headers.PREFILL_PROOF.encode()
_REQUEST_ID: Final = headers.REQUEST_ID.encode()
_DATA_PARALLEL: Final = headers.DATA_PARALLEL_HOST_PORT.encode()
_PREFILLERS: Final = headers.PREFILLER_HOST_PORT.encode()

_BUCKETS: Final = 1 << 15
"""With four places each: 250 plans a second, each for the two minutes of its life. Of more, some
are forgotten before their end, and could be used again until then."""
_RECORD: Final = Struct("<12sI")
"""A plan, and its end: the Unix second after which it may be forgotten."""
_LATEST: Final = 2**32 - 2
"""The latest second that a record holds. Only a wrong clock signs a plan with a later end."""
_BUCKET: Final = Struct("<" + "12xI" * 4)
"""The ends of its four records."""
_BUCKET_BYTES: Final = _BUCKET.size
_RECORD_BYTES: Final = _RECORD.size
_TABLE_BYTES: Final = _BUCKETS * _BUCKET_BYTES
_MAC_CHARACTERS: Final = 12
"""Of the MAC's 22: 72 bits, which two plans never share."""

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A prefill pod that the request may be prefilled on."""

    name: str
    address: HostPort
    rank: int | None = None
    """The data-parallel rank that is to compute the prefill; None: the engine chooses."""
    asks_for_proof: bool = False
    """Whether its sidecar takes a prefill leg only with a proof (`plan.prove_prefill`)."""


class Route(msgspec.Struct, frozen=True, gc=False):
    """How a request is to be served."""

    path: RoutingPath
    reason: str
    """Why this path, one word; a metric label."""
    candidates: tuple[Candidate, ...] = ()
    decode_name: str = ""
    """This pod's name in the plan; empty without a plan."""
    decode_address: str = ""
    """Where the plan says that this pod is; empty without a plan."""
    decode_rank: int | None = None
    """The data-parallel rank of this pod's engine that serves the request; None: it chooses."""
    routed: bool = False
    """Whether a router sent the request. It gets `x-tandem-timing` with the answer and removes it
    before the client sees it."""
    ignored: int = 0
    """Number of prefill addresses left out because the allow-list does not contain them."""
    error: str | None = None
    """Why a header was not trusted or an address was left out; None: neither happened."""
    timeouts: Timeouts = NO_TIMEOUTS
    """The time limits that the plan states."""
    alternates: tuple[Target, ...] = ()
    """Other pods that the plan names for the case that this one fails."""
    left: Candidate | None = None
    """The pod that the stream leaves because it drains, which still has the KV; None: none."""
    left_plan: str = ""
    """As of `plan.Plan`."""
    plan: str = ""
    """The MAC of the plan that was followed; empty without one."""
    resume: ResumeLimits | None = None
    """With which the plan asks that a stream goes on at an alternate; None: it does not ask."""


@dataclass(frozen=True, slots=True)
class AllowList:
    """Prefill pods that a header may name without a signed plan (`--prefill-allow`)."""

    networks: tuple[Network, ...] = ()
    addresses: frozenset[HostPort] = frozenset()

    def __contains__(self, address: object) -> bool:
        if address in self.addresses:
            return True
        try:
            ip = ipaddress.ip_address(address.host) if isinstance(address, HostPort) else None
        except ValueError:
            # A host name is allowed only if it is listed itself: networks say nothing about names.
            return False
        return ip is not None and any(ip in network for network in self.networks)


def parse_allow(entries: tuple[str, ...]) -> AllowList:
    """The allow-list of `entries`, each a CIDR or HOST:PORT. Raises ValueError naming the entry."""
    networks, addresses = [], []
    for entry in entries:
        try:
            networks.append(ipaddress.ip_network(entry))
            continue
        except ValueError as err:
            if "/" in entry:
                raise ValueError(f"{entry!r} is not a network: {err}") from err
        try:
            addresses.append(parse_host_port(entry))
        except ValueError as err:
            raise ValueError(f"{entry!r} is neither a CIDR nor HOST:PORT") from err
    return AllowList(tuple(networks), frozenset(addresses))


class UsedPlans:
    """Which signed plans were used: each splits one request.

    A table of fixed size. All workers of a sidecar share it: a repeated plan may reach another one.

        bucket, by CRC-32 of the MAC:  4 × [ 12 bytes of the MAC | 4 bytes: when it may go ]

    A place is written over once its plan has expired, or when the bucket is full: then the plan
    that expires first is forgotten early. Two workers that look at the same moment may both accept
    a plan; without a lock no worker can hold up another one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: the table that a supervisor has made; None: this process serves alone."""
        self._memory = mmap.mmap(-1 if descriptor is None else descriptor, _TABLE_BYTES)

    @staticmethod
    def create() -> int:
        """Make a table for several processes; returns its file descriptor, which they inherit."""
        descriptor = os.memfd_create("tandem-used-plans")
        os.ftruncate(descriptor, _TABLE_BYTES)
        return descriptor

    def use(self, plan: str, expires: float, now: float) -> bool:
        """Whether `plan`, a header whose signature holds until `expires` (Unix seconds), is used
        for the first time; it counts as used from now on."""
        mac = plan[-_MAC_CHARACTERS:].encode()
        memory, start = self._memory, crc32(mac) % _BUCKETS * _BUCKET_BYTES
        ends = _BUCKET.unpack_from(memory, start)
        at = memory.find(mac, start, start + _BUCKET_BYTES)
        if at >= 0 and ends[(at - start) // _RECORD_BYTES] >= now:
            return False
        # The end of an empty place is 0.
        place = ends.index(min(ends))
        may_go = int(min(expires, _LATEST)) + 1
        _RECORD.pack_into(memory, start + place * _RECORD_BYTES, mac, may_go)
        return True


def route(
    request: Request,
    request_id: str,
    keys: Mapping[str, bytes],
    allow: AllowList,
    now: float,
    *,
    is_own: Callable[[Target], bool],
    used: UsedPlans,
) -> Route:
    """The route of `request`.

    `now`: Unix seconds, for the plan's expiry. `request_id`: the id that the plan must be signed
    for, so that a plan cannot be used for another request. `is_own`: whether a plan's target is
    this pod. `used`: the plans that were followed before; this one is added.

    Raises PlanRejected for a plan that says it is for the rest of a stream, and does not hold:
    without it, the rest of a chat cannot be told from the whole.
    """
    plan = None
    try:
        plan = request.single(_PLAN)
        prefillers = request.single(_PREFILLERS)
        if keys:
            if plan is None and prefillers is None:
                return Route(RoutingPath.UNIFIED, UNROUTED)
            # An unsigned header without a plan is verified as an empty plan, and rejected: with
            # keys, a client must not be able to choose a prefill pod.
            value = (plan or b"").decode("ascii")
            verified = verify(value, keys, request_id=request_id, now=now)
            own = _own_target(verified, is_own)
            if not used.use(value, verified.expires, now):
                raise PlanRejected("the plan was used before")
            return _route_of_plan(verified, own, mac_of(value))
        if plan is not None and says_resume(plan):
            raise PlanRejected("there is no key to verify the plan with")
        if prefillers is not None:
            return _route_of_header(prefillers.decode("ascii"), allow)
    except (PlanRejected, ValueError) as err:
        if plan is not None and says_resume(plan):
            raise PlanRejected(f"the rest of a stream is not served: {err}") from err
        return Route(RoutingPath.UNIFIED, NOT_TRUSTED, error=str(err))
    return Route(RoutingPath.UNIFIED, UNROUTED)


class ProvenLeg(msgspec.Struct, frozen=True, gc=False):
    """A prefill leg that another pod's sidecar sends to this pod."""

    attempt_id: str
    """Its request id, by which the engines of both pods match the legs."""
    target: Target
    """This pod, as the proof names it."""
    left_plan: str = ""
    """As of `plan.Plan`, if it is of a stream that leaves this pod."""


def proven_leg(
    request: Request,
    keys: Mapping[str, bytes],
    now: float,
    *,
    is_own: Callable[[Target], bool],
    used: UsedPlans,
) -> ProvenLeg | None:
    """The prefill leg that `request` is; None without a proof, or without keys to check it.

    The arguments are those of `route`. Raises PlanRejected for a proof that does not hold here.
    """
    if not keys or PROOF not in request.values:
        return None
    try:
        proof, attempt_id = request.single(PROOF), request.single(_REQUEST_ID)
        value, identity = (proof or b"").decode("ascii"), (attempt_id or b"").decode("latin-1")
    except ValueError as err:
        raise PlanRejected(f"the proof of a prefill leg is malformed: {err}") from err
    plan = verify_proof(value, keys, attempt_id=identity, now=now)
    if not is_own(plan.decode):
        raise PlanRejected("the proof of a prefill leg is for another pod")
    if not used.use(value, plan.expires, now):
        raise PlanRejected("the proof of a prefill leg was used before")
    return ProvenLeg(identity, plan.decode, plan.left_plan)


def rank_of(request: Request, arrived: int, first_port: int) -> int:
    """The data-parallel rank that an unsigned header names, by its port.

    Without the header it is `arrived`, the rank on whose port the request came. Raises ValueError,
    without the header's value.
    """
    value = request.single(_DATA_PARALLEL)
    if value is None:
        return arrived
    try:
        return parse_host_port(value.decode("ascii")).port - first_port
    except ValueError:
        raise ValueError(f"{headers.DATA_PARALLEL_HOST_PORT} is not HOST:PORT") from None


def _own_target(plan: Plan, is_own: Callable[[Target], bool]) -> Target:
    """This pod in the plan. Raises PlanRejected if Envoy may not send the request to it."""
    if plan.alternates is None or is_own(plan.decode):
        return plan.decode
    for target in plan.alternates:
        if is_own(target):
            return target
    raise PlanRejected(
        f"the plan is for the pod {plan.decode.name} at {plan.decode.address}: if that is this"
        " pod, behind a translated address, start its sidecar with --pod-name and that name"
    )


def _route_of_plan(plan: Plan, own: Target, mac: str) -> Route:
    split = plan.path is SPLIT
    return Route(
        plan.path,
        plan.reason,
        tuple([_candidate(target) for target in plan.prefill]) if split else (),
        decode_name=own.name,
        decode_address=own.address,
        decode_rank=own.rank,
        routed=True,
        timeouts=plan.timeouts,
        # An alternate has the request because the pod that was chosen failed.
        alternates=tuple([each for each in plan.alternates or () if each is not own]),
        resume=plan.resume,
        left=_candidate(plan.left) if split and plan.left is not None else None,
        left_plan=plan.left_plan,
        plan=mac,
    )


@lru_cache(maxsize=4096)
def _candidate(target: Target) -> Candidate:
    name, address = target.name or target.address, parse_host_port(target.address)
    return Candidate(name, address, target.rank, target.asks_for_proof)


def _route_of_header(value: str, allow: AllowList) -> Route:
    """The route of an unsigned header; addresses outside the allow-list are left out."""
    try:
        addresses = [parse_host_port(part.strip()) for part in value.split(",") if part.strip()]
    except ValueError:
        # The error is logged: leave the header's value out, the client chose it.
        raise ValueError(f"{headers.PREFILLER_HOST_PORT} is not a list of HOST:PORT") from None
    allowed = tuple(Candidate(str(address), address) for address in addresses if address in allow)
    ignored = len(addresses) - len(allowed)
    error = f"{ignored} prefill addresses are outside --prefill-allow" if ignored else None
    if not allowed:
        reason = NOT_TRUSTED if ignored else UNROUTED
        return Route(RoutingPath.UNIFIED, reason, ignored=ignored, error=error)
    return Route(SPLIT, "named", allowed, routed=True, ignored=ignored, error=error)
