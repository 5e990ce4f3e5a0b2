"""Stores behind a network that fails: toxiproxy before versitygw and before `tandem store`.

No request waits longer than its deadline, no answer is wrong, and a store that is healthy again is
used again without a restart.
"""

import asyncio
import random
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tandem_contract.commandline import HostPort
from tandem_kvstore.chunk_store import Outcome
from tandem_kvstore.client import LoadResult, StoreClient
from tandem_kvstore.errors import Reason
from tandem_kvstore.guard.breaker import BreakerSettings, BreakerState
from tandem_kvstore.location import StoreLocation

from ..chaos.toxiproxy import Toxiproxy, toxiproxy
from ..epp.real import until
from .gate import error, gate, refuse_nothing
from .kv import Engine, chain, client, engine, group_specs, layer_groups
from .servers import Server, s3_location, tandem_store, versitygw

pytestmark = pytest.mark.component

QUICK = BreakerSettings(cool_down=0.1, longest=0.2, probe_timeout=1.0)
SEEN_OPEN = BreakerSettings(cool_down=1.0, longest=1.0, probe_timeout=1.0)
"""Open for longer than a busy machine takes to notice."""
NAME = "store"


@dataclass
class Remote:
    """A store behind a toxiproxy."""

    server: Server
    proxies: Toxiproxy
    location: StoreLocation

    async def poison(self, kind: str, **attributes: int) -> None:
        await self.proxies.poison(NAME, kind, **attributes)

    async def cure(self, kind: str) -> None:
        await self.proxies.cure(NAME, kind)

    async def enable(self, enabled: bool) -> None:
        """Accept connections, or refuse them and cut those that are open."""
        await self._change(enabled=enabled)

    async def connect_to(self, endpoint: str) -> None:
        """Pass connections on to another server."""
        await self._change(upstream=endpoint.removeprefix("http://"))

    async def _change(self, **fields: object) -> None:
        url = f"{self.proxies.url}/proxies/{NAME}"
        async with self.proxies.http.post(url, json=fields) as answer:
            assert answer.status == 200, await answer.text()


@pytest.fixture(params=["http", "s3"])
async def remote(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    versitygw_program: None,
    toxiproxy_program: None,
) -> AsyncIterator[Remote]:
    start = tandem_store if request.param == "http" else versitygw
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(start(tmp_path))
        proxies = await stack.enter_async_context(toxiproxy())
        host, _, port = server.location.endpoint.removeprefix("http://").rpartition(":")
        address = await proxies.before(NAME, HostPort(host, int(port)))
        yield Remote(server, proxies, replace(server.location, endpoint=f"http://{address}"))


async def load(reader: StoreClient, behind: Engine, seed: int = 1) -> LoadResult:
    """Load a prompt of five chunks, and check what was delivered."""
    chunks = chain(seed, 5)
    result = await reader.load(chunks, group_specs(), behind.deliver, context=0)
    behind.assert_delivered(chunks[: result.chunks])
    behind.delivered.clear()
    return result


async def store_prompts(server: Server, *seeds: int) -> None:
    writer = engine(server.location)
    for seed in seeds:
        await writer.put_all(chain(seed, 5))
    await writer.chunks.close()


async def closed_again(reader: StoreClient) -> None:
    """Wait until a probe has closed the circuit breaker."""

    async def is_closed() -> bool:
        return reader.guard.breaker.allows

    await until(is_closed)


async def test_a_slow_store_ends_at_the_deadline_and_is_left_alone_afterwards(
    remote: Remote,
) -> None:
    await store_prompts(remote.server, 1)
    reader, behind, counts = client(remote.location, compute=0.001)
    await remote.poison("latency", latency=1000)
    assert (await load(reader, behind)).reason is Reason.TIMEOUT
    # The cost model knows now: the next prompt of this length is computed at once.
    assert (await load(reader, behind)).reason is Reason.UNPROFITABLE
    assert counts.loaded == 0
    assert reader.guard.breaker.allows
    await reader.close()


async def test_a_stalled_store_opens_the_breaker_which_closes_without_a_restart(
    remote: Remote,
) -> None:
    await store_prompts(remote.server, 1)
    reader, behind, _ = client(remote.location, compute=0.004, breaker=QUICK, retry=0.2)
    await remote.poison("latency", latency=60_000)
    reasons = [(await load(reader, behind)).reason for _ in range(6)]
    assert reasons[0] is Reason.TIMEOUT
    assert Reason.BREAKER_OPEN in reasons or Reason.UNPROFITABLE in reasons
    await remote.cure("latency")
    await closed_again(reader)
    # The cost model remembers how slow the store was, until a request tries again.
    await load_until_whole(reader, behind)
    await reader.close()


async def load_until_whole(reader: StoreClient, behind: Engine) -> None:
    """Load until all chunks come from the store."""

    async def is_whole() -> bool:
        return (await load(reader, behind)).chunks == 5

    await until(is_whole)


async def test_s3_switched_off_until_restart_after_three_errors(
    remote: Remote, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="tandem_kvstore.health")
    await store_prompts(remote.server, 1)
    reader, behind, counts = client(remote.location, breaker=SEEN_OPEN)
    await remote.enable(False)
    reasons = [(await load(reader, behind)).reason for _ in range(4)]
    assert reasons == [Reason.UNAVAILABLE] * 3 + [Reason.BREAKER_OPEN]
    assert reader.guard.breaker.state is not BreakerState.CLOSED
    assert not await reader.store(chain(2, 1)[0], layer_groups(chain(2, 1)[0]))
    assert counts.not_stored == {Reason.BREAKER_OPEN: 1}
    await remote.enable(True)
    await closed_again(reader)
    lines = [r.getMessage() for r in caplog.records if r.name == "tandem_kvstore.health"]
    opened, closed = lines
    assert opened.startswith("the external store failed several times in a row")
    assert closed.startswith("the external store answers again")
    assert (await load(reader, behind)).chunks == 5
    await reader.close()


async def test_a_connection_that_breaks_in_the_middle_leaves_whole_chunks(remote: Remote) -> None:
    await store_prompts(remote.server, 1)
    reader, behind, counts = client(remote.location, breaker=QUICK)
    # Of each connection: manifests pass, a data object of 8 KB does not.
    await remote.poison("limit_data", bytes=6_000)
    result = await load(reader, behind)
    assert result.chunks < 5
    assert result.reason is Reason.UNAVAILABLE
    assert counts.not_loaded == {Reason.UNAVAILABLE: 5 - result.chunks}
    await reader.close()


async def test_a_peer_that_accepts_and_never_answers(remote: Remote) -> None:
    await store_prompts(remote.server, 1)
    location = replace(remote.location, timeout=0.5)
    reader, behind, counts = client(location, compute=0.02, breaker=QUICK, retry=0.2)
    # The kernel accepts its connections, and no process reads from them.
    silent = socket.create_server(("127.0.0.1", 0))
    await remote.connect_to(f"127.0.0.1:{silent.getsockname()[1]}")
    assert (await load(reader, behind)).reason is Reason.TIMEOUT
    (chunk,) = chain(2, 1)
    assert not await reader.store(chunk, layer_groups(chunk))
    assert counts.not_stored.keys() <= {Reason.TIMEOUT, Reason.BREAKER_OPEN}
    silent.close()
    await remote.connect_to(remote.server.location.endpoint)
    await closed_again(reader)
    await load_until_whole(reader, behind)
    await reader.close()


async def test_a_peer_that_goes_silent_in_the_middle_of_a_body(remote: Remote) -> None:
    await store_prompts(remote.server, 1)
    reader, behind, counts = client(remote.location, compute=0.02, breaker=QUICK, retry=0.2)
    # The first 400 bytes of an answer come; the next come a minute later.
    await remote.poison("slicer", average_size=400, delay=60_000_000)
    result = await load(reader, behind)
    assert (result.chunks, result.reason) == (0, Reason.TIMEOUT)
    assert counts.loaded == 0
    await remote.cure("slicer")
    await closed_again(reader)
    await load_until_whole(reader, behind)
    await reader.close()


async def test_a_store_that_answers_403_for_a_while_is_used_again(remote: Remote) -> None:
    await store_prompts(remote.server, 1)
    async with gate(remote.server.location, lambda _: error(403, "AccessDenied")) as front:
        reader, behind, _ = client(front.location, breaker=SEEN_OPEN)
        reasons = [(await load(reader, behind)).reason for _ in range(4)]
        assert reasons == [Reason.DENIED] * 3 + [Reason.BREAKER_OPEN]
        front.refuse = refuse_nothing
        await closed_again(reader)
        assert (await load(reader, behind)).chunks == 5
        await reader.close()


async def test_a_flapping_store_gives_right_answers_only(remote: Remote) -> None:
    seeds, source = range(1, 5), random.Random(18)
    await store_prompts(remote.server, *seeds)
    reader, behind, counts = client(remote.location, breaker=QUICK)
    for _ in range(40):
        await remote.enable(source.random() < 0.6)
        await load(reader, behind, source.choice(seeds))
    await remote.enable(True)
    await closed_again(reader)
    await load_until_whole(reader, behind)
    assert counts.loaded > 0
    await reader.close()


async def test_wrong_credentials_are_denied_and_shown_nowhere(
    tmp_path: Path, versitygw_program: None, caplog: pytest.LogCaptureFixture
) -> None:
    async with versitygw(tmp_path) as server:
        await store_prompts(server, 1)
        wrong = s3_location(server.location.endpoint, secret="the-wrong-secret")
        reader, behind, _ = client(wrong, breaker=QUICK)
        assert (await load(reader, behind)).reason is Reason.DENIED
        assert "the-wrong-secret" not in caplog.text + repr(wrong) + str(wrong.credentials)
        assert "the store refused the credentials" in caplog.text
        await reader.close()


async def test_a_bucket_that_is_missing_has_no_chunks(remote: Remote) -> None:
    elsewhere = replace(remote.location, namespace="no-such-bucket/kv-cache")
    reader, behind, counts = client(elsewhere)
    assert (await load(reader, behind)).reason is Reason.MISSING
    if remote.server.location.credentials is not None:
        chunk = chain(1, 1)[0]
        assert not await reader.store(chunk, layer_groups(chunk))
        assert counts.not_stored == {Reason.MISSING: 1}
    await reader.close()


async def test_a_full_store_can_still_be_read(tmp_path: Path) -> None:
    async with tandem_store(tmp_path, "--capacity-bytes", "100000") as server:
        await store_prompts(server, 1)
    async with tandem_store(tmp_path, "--max-object-bytes", "1000") as server:
        writer, behind, counts = client(server.location)
        chunk = chain(2, 1)[0]
        assert not await writer.store(chunk, layer_groups(chunk))
        assert counts.not_stored == {Reason.FULL: 1}
        assert (await load(writer, behind)).chunks == 5
        await writer.close()


async def test_a_writer_that_is_killed_leaves_nothing_visible(remote: Remote) -> None:
    chunk = chain(1, 1)[0]
    observer = engine(remote.server.location)
    # Slow enough that the writer is killed between its first data object and the manifest.
    url = f"{remote.proxies.url}/proxies/{NAME}/toxics"
    limit = {"type": "bandwidth", "stream": "upstream", "attributes": {"rate": 10}}
    async with remote.proxies.http.post(url, json=limit) as answer:
        assert answer.status == 200, await answer.text()
    secret = "" if remote.location.credentials is None else "s3"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.kvstore.writer", remote.location.endpoint, secret
    )

    async def has_data() -> bool:
        return len([info async for info in observer.objects.scan()]) > 0

    await until(has_data)
    process.send_signal(signal.SIGKILL)
    await process.wait()
    assert await observer.chunks.find([chunk]) == ([], Outcome(0, Reason.MISSING))
    await observer.put_all([chunk], writer=2)
    manifests, _ = await observer.chunks.find([chunk])
    assert (await observer.chunks.load(manifests, group_specs(), observer.deliver)).chunks == 1
    observer.assert_delivered([chunk], writers=(2,))
    await observer.chunks.close()
