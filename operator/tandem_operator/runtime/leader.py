"""Leader election between replicas with a Lease, run by kubernetes.aio's LeaderElection.

    async with Leadership(lock, times) as leadership:
        await leadership.gained.wait()      # … work until leadership.lost is set, then exit

The lock is our own, on plain JSON. The library's lock writes local time as if it were UTC, does not
count transitions, and ends the election on the first broken connection.
"""

import asyncio
import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Self

from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.baselock import BaseLock

from tandem_kube.client import Api
from tandem_kube.errors import ApiError
from tandem_kube.resources import LEASES, Object

LEASE_NAME: Final = "tandem-operator"


@dataclass(frozen=True)
class LeaseTimes:
    """Times of the election, in seconds. The defaults are those of Kubernetes' own controllers."""

    duration: float = 15.0
    """Seconds after the last renewal at which another replica may take over. Too low: the leader
    loses the Lease when the API server is slow, and exits. Too high: after a leader died, no pool
    is reconciled for that long."""
    renew: float = 10.0
    """Seconds without a successful renewal after which the leader stops. Less than `duration`: the
    difference is the time that the old leader's last write may take. Too close to `duration`: two
    replicas may write at once."""
    retry: float = 2.0
    """Seconds between two attempts to renew or to acquire. Too low: needless calls to the API
    server. Too high: few attempts fit into `renew`, and one failed call may cost the Lease."""

    @classmethod
    def for_duration(cls, duration: float) -> Self:
        """The default proportions scaled to another `duration`, which is at least 3 s."""
        return cls(duration, duration * 2 / 3, max(1.0, duration * 2 / 15))


class LeaseLock(BaseLock):
    """Reads and writes the Lease for the election."""

    def __init__(self, api: Api, namespace: str, identity: str, name: str = LEASE_NAME) -> None:
        super().__init__(name, namespace, identity)
        self._api = api
        # As last read or written: its resourceVersion lets only one of two replicas replace it.
        self._lease: Object = {}

    async def get(
        self, name: str, namespace: str
    ) -> tuple[bool, LeaderElectionRecord] | tuple[bool, Exception] | tuple[bool, None]:
        try:
            self._lease = await self._api.get(LEASES, name, namespace)
        except ApiError as err:
            # The election decides by the code in the body, as if the library's client had raised.
            refused = ApiException(status=err.status, reason=err.message)
            refused.body = json.dumps({"code": err.status})
            return False, refused
        spec = self._lease.get("spec") or {}
        return True, LeaderElectionRecord(
            spec.get("holderIdentity") or None,
            spec.get("leaseDurationSeconds"),
            spec.get("acquireTime"),
            spec.get("renewTime"),
        )

    async def create(
        self, name: str, namespace: str, election_record: LeaderElectionRecord
    ) -> bool:
        metadata = {"name": name, "namespace": namespace}
        lease = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": metadata}
        return await self._succeeds(
            self._api.create(LEASES, lease | self._spec(election_record, {}))
        )

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        """Replaces the Lease as last read; False, by a Conflict, when another replica was first."""
        spec = self._spec(updated_record, self._lease.get("spec") or {})
        return await self._succeeds(self._api.replace(LEASES, self._lease | spec))

    async def release(self) -> None:
        """Give the Lease up so that another replica can take over at once.

        Raises ApiError; then the others wait until the Lease expires.
        """
        exists, _ = await self.get(self.name, self.namespace)
        spec = self._lease.get("spec") or {}
        if exists and spec.get("holderIdentity") == self.identity:
            # As client-go releases: the API server refuses a duration of 0.
            released = {**spec, "holderIdentity": "", "leaseDurationSeconds": 1}
            await self._api.replace(LEASES, self._lease | {"spec": released})

    def _spec(self, record: LeaderElectionRecord, before: Mapping[str, Any]) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {**before, "leaseDurationSeconds": int(float(record.lease_duration or 0))}
        spec |= {"holderIdentity": record.holder_identity, "renewTime": now}
        # Only a change of the holder counts as a transition, not a renewal.
        if before.get("holderIdentity") != record.holder_identity:
            spec |= {"acquireTime": now, "leaseTransitions": before.get("leaseTransitions", -1) + 1}
        return {"spec": spec}

    async def _succeeds(self, write: Any) -> bool:
        # The election retries on False until its deadline; an exception would end it at once.
        with contextlib.suppress(ApiError):
            self._lease = await write
            return True
        return False


class Leadership:
    """One replica's part in the election, while the context is open.

    Leaving the context releases the Lease, unless it was lost before.
    """

    def __init__(self, lock: LeaseLock, times: LeaseTimes) -> None:
        self.gained = asyncio.Event()
        """Set when this replica becomes the leader."""
        self.lost = asyncio.Event()
        """Set when it could not renew in time; it must stop writing at once."""
        self._lock = lock
        self._election = LeaderElection(
            Config(
                lock,
                lease_duration=times.duration,
                renew_deadline=times.renew,
                retry_period=times.retry,
                onstarted_leading=self._started,
                onstopped_leading=self._stopped,
            )
        )
        self._running: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        # In the background: the election renews the Lease while the leader works.
        self._running = asyncio.create_task(self._election.run(), name="leader election")
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._running is not None:
            # End the election first, or it could renew the Lease right after its release.
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        # A lost Lease may already belong to another replica.
        if self.gained.is_set() and not self.lost.is_set():
            with contextlib.suppress(ApiError):
                await self._lock.release()

    async def _started(self) -> None:
        self.gained.set()

    async def _stopped(self) -> None:
        self.lost.set()
