"""An older EPP beside a new one, as while a Deployment rolls: they know each other's requests."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from ..epp.envoy.test_replicas_with_envoy import two_epps
from ..epp.real import until

pytestmark = pytest.mark.component


async def test_an_older_replica_beside_a_new_one(older_packages: str, tmp_path: Path) -> None:
    """The older one asks the new one before it decides in a burst, and gets no answer."""
    async with two_epps(tmp_path, "BUFFERED", PYTHONPATH=older_packages) as stack:
        sent = [asyncio.create_task(stack.post(number, slow=True)) for number in range(60)]
        await until(partial(stack.all_count, 60))
        older, new = stack.epps
        assert min([await each.in_flight() for each in stack.epps]) > 0, "Envoy uses both replicas"
        assert (await older.figures())["tandem_epp_turns_expired_total"] > 0
        assert "tandem_epp_turns_expired_total" not in await new.figures()
        stack.release()
        assert await asyncio.gather(*sent) == [b"first last"] * 60
