"""Hand-offs through storage: engines that no side channel connects, only a store."""

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tandem_contract import metrics
from tandem_kvstore import client

from ...cluster.fixtures import LEFT_OUT
from ...engine.tiers.conftest import PatientGuard
from ...kvstore.servers import store_in_this_process
from ...namespaces import NotPermitted, enter, namespaces
from .engine import Engine, engines
from .pair import FALLBACK, SPLIT, call, expected_tokens, start_pair

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]

CHUNK = 32
# Time limits that a busy machine does not reach: these tests are about what is stored.
CONNECTOR = (
    *("--connector", "storage", "--kv-transfer-timeout", "120s"),
    *("--prefill-timeout", "120s", "--silence-timeout", "60s"),
)
TRANSFERS = f"{metrics.KV_TRANSFER_SECONDS}_count"


@pytest.fixture(scope="module")
def stored_engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Engine]]:
    """Engines without a side channel, not started: `decode` and `prefill` share a store,
    `elsewhere` has another one, and that of `nowhere` does not answer."""
    directory = tmp_path_factory.mktemp("stored")

    def kind(endpoint: str) -> dict[str, object]:
        config = {"endpoint": endpoint, "kv_namespace": "kv", "chunk_tokens": CHUNK}
        return {"side_channel": False, "flags": ("--kv-storage-config", json.dumps(config))}

    shared = kind(f"file://{directory}/stores/shared")
    elsewhere, nowhere = kind(f"file://{directory}/stores/other"), kind("http://127.0.0.1:9")
    kinds = {"decode": shared, "prefill": shared, "elsewhere": elsewhere, "nowhere": nowhere}
    started = dict(zip(kinds, engines(directory, **kinds), strict=True))
    try:
        yield started
    finally:
        for engine in started.values():
            with contextlib.suppress(ProcessLookupError):
                engine.kill()


@pytest.fixture
def stored(stored_engines: dict[str, Engine], request: pytest.FixtureRequest) -> dict[str, Engine]:
    """The engines, those that no test has started yet not running; after a failed test none."""
    for engine in stored_engines.values():
        engine.kill_after_failure(request.session.testsfailed)
    return stored_engines


async def start(stored: dict[str, Engine], prefill: str) -> tuple[Engine, Engine]:
    for name in ("decode", prefill):
        await stored[name].up()
    return stored["decode"], stored[prefill]


async def loaded(engine: Engine) -> float:
    return await engine.figure(metrics.ENGINE_TIER_LOADED, tier="storage")


async def computed(engine: Engine) -> float:
    """Prompt tokens that it has computed since its start."""
    source = metrics.PromptSource.COMPUTED
    return await engine.figure(metrics.ENGINE_PROMPT_BY_SOURCE, source=source)


async def test_kv_moves_through_the_store_alone(stored: dict[str, Engine]) -> None:
    decode, prefill = await start(stored, "prefill")
    async with start_pair(decode, *CONNECTOR) as pair:
        request = call(1)
        result = await pair.ask(request, prefill.address)
        assert result.tokens == expected_tokens(request)
        assert result.path == SPLIT.value
        assert await loaded(decode) == 96
        # The engine's own time, and no failure.
        assert await pair.figure(TRANSFERS) == 1
        assert await pair.errors() == {}


async def test_a_clients_reference_does_not_reach_the_engine(stored: dict[str, Engine]) -> None:
    decode, _ = await start(stored, "prefill")
    failed, before = await decode.figure(metrics.ENGINE_XFER_FAILED), await loaded(decode)
    key = "ab" * 32
    reference = {"path": f"kv/{key}", "prefix_hash": key, "token_count": 96}
    params = {"tandem_kv_reference": reference, "tandem_kv_load_timeout": 5}
    async with start_pair(decode, *CONNECTOR) as pair:
        body = {"model": "tiny", "prompt": list(call(2).prompt), "max_tokens": 1}
        url = f"{pair.url}/v1/completions"
        async with pair.http.post(url, json={**body, "kv_transfer_params": params}) as answer:
            assert answer.status == 200, await answer.text()
    # An engine that sees the reference counts a failure: it is of another prompt.
    assert await decode.figure(metrics.ENGINE_XFER_FAILED) == failed
    assert await loaded(decode) == before


async def test_kv_that_was_not_stored_is_computed_by_the_decode_engine(
    stored: dict[str, Engine],
) -> None:
    decode, prefill = await start(stored, "nowhere")
    async with start_pair(decode, *CONNECTOR) as pair:
        request = call(3)
        result = await pair.ask(request, prefill.address)
        assert (result.tokens, result.path) == (expected_tokens(request), FALLBACK.value)
        assert await pair.errors() == {"kv_transfer": 1}
        assert await pair.figure(TRANSFERS) == 0


async def test_engines_with_different_stores_count_failed_transfers(
    stored: dict[str, Engine],
) -> None:
    decode, prefill = await start(stored, "elsewhere")
    before = await loaded(decode)
    async with start_pair(decode, *CONNECTOR) as pair:
        request = call(4)
        result = await pair.ask(request, prefill.address)
        # The decode engine finds nothing in its own store, and computes without telling.
        assert (result.tokens, result.path) == (expected_tokens(request), SPLIT.value)
        assert await loaded(decode) == before
        await pair.wait_for_errors(kv_transfer=1)


def load_whatever_is_stored() -> None:
    """In an engine's process: a busy machine is too slow for the deadlines of loads."""
    client.LoadGuard = PatientGuard  # type: ignore[misc]


@pytest.mark.parametrize("connector", ["nixl", "storage"])
async def test_after_both_engines_restarted_nothing_is_computed_again(
    tmp_path: Path, connector: str
) -> None:
    config = {"endpoint": f"file://{tmp_path}/store", "chunk_tokens": CHUNK}
    kind = {
        "side_channel": connector == "nixl",
        "flags": ("--kv-storage-config", json.dumps(config)),
        "prepare": load_whatever_is_stored,
    }
    request, whole = call(6, length=200), 6 * CHUNK
    both = engines(tmp_path, decode={"role": "kv_consumer", **kind}, prefill=kind)
    decode, prefill = both
    with contextlib.ExitStack() as stack:
        for engine in both:
            stack.callback(engine.kill)
            await engine.up()
        async with start_pair(decode, *CONNECTOR, "--connector", connector) as pair:
            first = await pair.ask(request, prefill.address)
            assert (first.tokens, first.path) == (expected_tokens(request), SPLIT.value)
            assert await computed(prefill) == 200
            for engine in both:
                await engine.end()
            for engine in both:
                await engine.up()
            second = await pair.ask(request, prefill.address)
            assert second.tokens == first.tokens
            assert await loaded(prefill) == whole
            assert await computed(prefill) == 200 - whole
            # It reads all of the prefill engine's KV, or loads the whole chunks, as with NIXL
            # where the sidecar names the prefill engine's former id.
            assert await computed(decode) <= 200 - whole


@pytest.mark.usefixtures("ip_program")
async def test_engines_without_a_network_between_them(tmp_path: Path) -> None:
    """Each engine reaches the store and no other engine; only the sidecar reaches both."""
    with contextlib.ExitStack() as stack:
        try:
            networks = stack.enter_context(namespaces(["decode", "prefill"]))
        except NotPermitted as err:
            pytest.skip(f"{LEFT_OUT}needs network namespaces: {err}")
        async with store_in_this_process(tmp_path / "store", networks.store) as store:
            place = {"endpoint": store.location.endpoint, "kv_namespace": "kv"}
            flags = ("--kv-storage-config", json.dumps({**place, "chunk_tokens": CHUNK}))
            started = {}
            for name, namespace in networks.names.items():
                started[name] = Engine(
                    *(networks.address(name), tmp_path / name),
                    flags=flags,
                    side_channel=False,
                    prepare=partial(enter, namespace),
                )
                stack.callback(started[name].kill)
                await started[name].up()
            decode, prefill = started["decode"], started["prefill"]
            host, port = store.location.endpoint.removeprefix("http://").rsplit(":", 1)
            assert all(networks.can_connect(name, host, int(port)) for name in networks.names)
            assert not networks.can_connect("decode", *prefill.address)
            assert not networks.can_connect("prefill", *decode.address)
            async with start_pair(decode, *CONNECTOR, "--prefill-allow", "198.18.0.0/15") as pair:
                request = call(5)
                result = await pair.ask(request, prefill.address)
                assert (result.tokens, result.path) == (expected_tokens(request), SPLIT.value)
                assert await loaded(decode) == 96
                assert await pair.errors() == {}
