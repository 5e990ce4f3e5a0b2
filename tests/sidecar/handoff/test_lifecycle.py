import asyncio

from tandem_contract.commandline import HostPort
from tandem_sidecar.handoff.context import Lifecycle


class Job:
    def __init__(self, lifecycle: Lifecycle) -> None:
        self.expired = self.drains = 0
        self._lifecycle = lifecycle

    def drain_expired(self) -> None:
        self.expired += 1
        self._lifecycle.remove(self)

    def engine_drains(self, engine: HostPort | None) -> None:
        assert engine is None
        self.drains += 1

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
    assert (job.drains, other.drains) == (1, 0)


async def test_the_engines_are_idle_once_all_work_is_elsewhere_or_done() -> None:
    lifecycle = Lifecycle(drain_timeout=3600)
    job, moved = Job(lifecycle), Job(lifecycle)
    lifecycle.add(job)
    lifecycle.add(moved)
    lifecycle.drain()
    waiting = asyncio.create_task(lifecycle.engines_idle())
    ended = asyncio.create_task(lifecycle.idle())
    lifecycle.has_moved(moved)
    lifecycle.remove(job)
    await asyncio.wait_for(waiting, 10)
    assert not ended.done()
    lifecycle.remove(moved)
    await asyncio.wait_for(ended, 10)
    assert not lifecycle.elsewhere


async def test_an_idle_process_drains_at_once() -> None:
    lifecycle = Lifecycle(drain_timeout=3600)
    lifecycle.drain()
    await asyncio.wait_for(lifecycle.idle(), 10)
