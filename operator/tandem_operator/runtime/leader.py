"""Leader election between replicas with a Lease, by the algorithm of client-go.

    async with Leadership(api, namespace, identity, times) as leadership:
        await leadership.gained.wait()      # … work until leadership.lost is set, then exit
        writer = api.fenced(leadership.may_write)

    follower ──Lease free, or unchanged for `duration`──► leader ──not renewed for `renew`──► lost

Only monotonic time decides, each replica by its own clock: a follower counts from the moment at
which it saw the Lease change, the leader from the moment before it sent its last renewal. So the
leader stops before a follower starts. kubernetes.aio has an election too, but it goes by wall-clock
time and does not limit its calls: one that hangs lets the old leader go on writing.
"""

import asyncio
import contextlib
import logging
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Self

from tandem_kube.client import Api
from tandem_kube.errors import ApiError, Conflict, NotFound
from tandem_kube.resources import LEASES, Object

LEASE_NAME: Final = "tandem-operator"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTimes:
    """Times of the election, in seconds. The defaults are those of Kubernetes' own controllers."""

    duration: float = 15.0
    """Seconds after the last renewal at which another replica may take over. Too low: the leader
    loses the Lease when the API server is slow, and exits. Too high: after a leader died, no pool
    is reconciled for that long."""
    renew: float = 10.0
    """Seconds after the last successful renewal at which the leader stops: it starts no further
    write and cancels those in progress. Less than `duration`: the difference is the time that the
    API server may take for the old leader's last write. Too close to `duration`: two replicas may
    write at once."""
    retry: float = 2.0
    """Seconds between two attempts to renew or to acquire. Too low: needless calls to the API
    server. Too high: few attempts fit into `renew`, and one failed call may cost the Lease."""

    @classmethod
    def for_duration(cls, duration: float) -> Self:
        """The default proportions scaled to another `duration`, which is at least 3 s."""
        return cls(duration, duration * 2 / 3, max(1.0, duration * 2 / 15))


class HeldByAnother(Exception):
    """Another replica holds the Lease now."""


class Leadership:
    """One replica's part in the election, while the context is open.

    Leaving the context releases the Lease, unless it was lost before.
    """

    def __init__(self, api: Api, namespace: str, identity: str, times: LeaseTimes) -> None:
        self.gained = asyncio.Event()
        """Set when this replica becomes the leader."""
        self.lost = asyncio.Event()
        """Set when it could not renew in time, or the election ended for any other reason: it must
        stop writing at once."""
        self._api, self._namespace, self._identity, self._times = api, namespace, identity, times
        # As last read or written: its resourceVersion lets only one of two replicas replace it.
        self._lease: Object = {}
        self._changed_at = 0.0
        """Loop time at which a follower last saw the Lease change."""
        self._writes_end = 0.0
        """Loop time until which the leader may write."""
        self._election: asyncio.Task[None] | None = None

    def may_write(self) -> bool:
        """Whether the Lease is surely this replica's now.

        Decided by the clock and not only by `lost`: a process that was stopped for a while resumes
        in the middle of its work, before the event loop runs any timer.
        """
        is_leader = self.gained.is_set() and not self.lost.is_set()
        return is_leader and _now() < self._writes_end

    async def __aenter__(self) -> Self:
        # In the background: the election renews the Lease while the leader works.
        self._election = asyncio.create_task(self._run(), name="leader election")
        self._election.add_done_callback(lambda _: self.lost.set())
        return self

    async def __aexit__(self, *_: object) -> None:
        is_leader = self.may_write()
        if self._election is not None:
            # End the election first, or it could renew the Lease right after its release.
            self._election.cancel()
            # Raises whatever else ended the election.
            with contextlib.suppress(asyncio.CancelledError):
                await self._election
        # A lost Lease may already belong to another replica.
        if is_leader:
            # When the release fails, the others wait until the Lease expires.
            with contextlib.suppress(ApiError, TimeoutError):
                async with asyncio.timeout_at(self._writes_end):
                    await self._release()

    async def _run(self) -> None:
        """Acquire the Lease and renew it; return when it is lost."""
        await self._until_done(self._acquire)
        self.gained.set()
        with contextlib.suppress(TimeoutError, HeldByAnother):
            while True:
                async with asyncio.timeout_at(self._writes_end):
                    await asyncio.sleep(self._times.retry)
                    await self._until_done(self._renew)

    async def _until_done(self, step: Callable[[], Awaitable[bool]]) -> None:
        while True:
            if await self._attempt(step):
                return
            await asyncio.sleep(self._times.retry)

    async def _attempt(self, step: Callable[[], Awaitable[bool]]) -> bool:
        """Whether `step` has acquired or renewed the Lease, which extends the time for writes."""
        # Before the call: followers may see the renewal at any moment from now on.
        started = _now()
        try:
            # Half of `renew`: when one call hangs, there is time for another.
            async with asyncio.timeout(self._times.renew / 2):
                succeeded = await step()
        except TimeoutError:
            log.warning("the API server did not answer a call about the Lease: trying again")
            return False
        except ApiError as err:
            log.warning("cannot acquire or renew the Lease, trying again: %s", err)
            return False
        if succeeded:
            self._writes_end = started + self._times.renew
        return succeeded

    async def _acquire(self) -> bool:
        """Take the Lease if it is free, or if its holder has not renewed it for its duration."""
        lease = await self._read()
        spec = lease.get("spec") or {}
        if spec != (self._lease.get("spec") or {}):
            self._changed_at = _now()
        self._lease = lease
        expires_at = self._changed_at + float(spec.get("leaseDurationSeconds") or 0)
        if spec.get("holderIdentity") and _now() < expires_at:
            return False
        return await self._write()

    async def _renew(self) -> bool:
        """Raises HeldByAnother."""
        if await self._write():
            return True
        # Someone else has changed or deleted the Lease; or our own last write succeeded although
        # its answer did not arrive.
        self._lease = await self._read()
        holder = (self._lease.get("spec") or {}).get("holderIdentity")
        if holder and holder != self._identity:
            raise HeldByAnother(holder)
        return await self._write()

    async def _read(self) -> Object:
        """The Lease as it is; a new one when there is none."""
        try:
            return await self._api.get(LEASES, LEASE_NAME, self._namespace)
        except NotFound:
            metadata = {"name": LEASE_NAME, "namespace": self._namespace}
            return {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata}

    async def _write(self) -> bool:
        """Write the Lease as ours; False when another replica, or another client, was first."""
        spec = dict(self._lease.get("spec") or {})
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        # Only a change of the holder counts as a transition, not a renewal.
        if spec.get("holderIdentity") != self._identity:
            spec |= {"acquireTime": now, "leaseTransitions": spec.get("leaseTransitions", -1) + 1}
        spec |= {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": math.ceil(self._times.duration),
            "renewTime": now,
        }
        exists = "resourceVersion" in self._lease["metadata"]
        write = self._api.replace if exists else self._api.create
        try:
            self._lease = await write(LEASES, self._lease | {"spec": spec})
        except (Conflict, NotFound):
            return False
        return True

    async def _release(self) -> None:
        """Give the Lease up so that another replica can take over at once."""
        lease = await self._read()
        spec = lease.get("spec") or {}
        if spec.get("holderIdentity") == self._identity:
            # As client-go releases: the API server refuses a duration of 0.
            released = {**spec, "holderIdentity": "", "leaseDurationSeconds": 1}
            await self._api.replace(LEASES, lease | {"spec": released})


def _now() -> float:
    """Monotonic seconds, by the clock that the event loop's timeouts use."""
    return asyncio.get_running_loop().time()
