import asyncio

from tandem_sidecar.handoff.context import Lifecycle


class Job:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self.expired = 0
        self._lifecycle = lifecycle

    def drain_expired(self) -> None:
        self.expired += 1
        self._lifecycle.remove(self)

    def describe(self) -> dict[str, object]:
        return {}


async def test_a_drain_waits_for_running_work_and_ends_it_at_the_timeout() -> None:
    lifecycle = Lifecycle(drain_timeout=0.05)
    job, other = Job(lifecycle), Job(lifecycle)
    lifecycle.add(job)
    lifecycle.add(other)
    lifecycle.remove(other)
    lifecycle.drain()
    lifecycle.drain()
    await asyncio.wait_for(lifecycle.idle(), 10)
    assert (job.expired, other.expired) == (1, 0)


async def test_an_idle_process_drains_at_once() -> None:
    lifecycle = Lifecycle(drain_timeout=3600)
    lifecycle.drain()
    await asyncio.wait_for(lifecycle.idle(), 10)
