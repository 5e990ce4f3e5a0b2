import asyncio
import ssl

import pytest
import trustme
from aiohttp import web

from tandem_loadtest.run.errors import NotReadyError
from tandem_loadtest.run.readiness import check_ready
from tandem_loadtest.run.spec import Target

from .engines import FakeOpenAI


async def check(
    url: str, *, wait: float = 0.0, key: str = "", ca_file: str | None = None
) -> tuple[str, ...]:
    target = Target(url=url, model="m", headers={"authorization": key}, ca_file=ca_file)
    return await check_ready(target, ["m"], wait=wait, stop=asyncio.Event())


async def test_a_server_that_serves_the_model_is_ready() -> None:
    engine = FakeOpenAI()
    engine.models = ["m", "other"]
    async with engine.serve() as url:
        assert await check(url) == ("m", "other")
        assert await check(f"{url}/v1/") == ("m", "other")


async def test_a_wrong_model_is_an_error_with_the_models_that_are_served() -> None:
    engine = FakeOpenAI()
    engine.models = ["tiny", "large"]
    async with engine.serve() as url:
        with pytest.raises(NotReadyError) as caught:
            await check(url)
    assert str(caught.value) == (
        f"{url}/v1/models: the server has no model 'm'; it serves tiny, large"
    )


async def test_an_unreachable_server_is_an_error_of_one_line() -> None:
    with pytest.raises(NotReadyError) as caught:
        await check("http://127.0.0.1:1")
    assert str(caught.value) == "http://127.0.0.1:1/health: cannot connect: Connection refused"
    with pytest.raises(
        NotReadyError, match=r"^http://host\.invalid/health: cannot connect: [^\n]+$"
    ):
        await check("http://host.invalid")


async def test_refused_credentials_are_an_error_that_names_the_flag() -> None:
    engine = FakeOpenAI()
    engine.authorization = "Bearer right"
    async with engine.serve() as url:
        with pytest.raises(NotReadyError, match=r"HTTP 401.*--api-key") as caught:
            await check(url, key="Bearer wrong-secret", wait=60.0)
        assert "wrong-secret" not in str(caught.value)
        assert await check(url, key="Bearer right") == ("m",)


async def test_a_server_that_is_not_healthy_is_an_error_unless_it_becomes_healthy() -> None:
    engine = FakeOpenAI()
    engine.health = 503
    async with engine.serve() as url:
        with pytest.raises(NotReadyError, match=r"/health: the server is not ready \(HTTP 503\)"):
            await check(url)
        waiting = asyncio.create_task(check(url, wait=60.0))
        await asyncio.sleep(0)
        engine.health = 200
        assert await waiting == ("m",)


async def test_a_stop_ends_the_wait() -> None:
    stop = asyncio.Event()
    stop.set()
    with pytest.raises(NotReadyError, match="cannot connect"):
        await check_ready(Target(url="http://127.0.0.1:1", model="m"), ["m"], wait=600.0, stop=stop)


async def test_a_server_without_these_endpoints_is_taken_as_ready() -> None:
    engine = FakeOpenAI()
    engine.health = 404
    engine.models = []
    async with engine.serve() as url:
        assert await check(f"{url}") == ()


async def test_a_certificate_of_another_authority_is_an_error_that_names_the_flag(
    tmp_path: object,
) -> None:
    authority = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("localhost").configure_cert(context)
    file = f"{tmp_path}/ca.pem"
    authority.cert_pem.write_to_path(file)
    app = web.Application()
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "localhost", 0, ssl_context=context).start()
        url = f"https://localhost:{runner.addresses[0][1]}"
        with pytest.raises(NotReadyError, match=r"TLS failed: .*--ca-file"):
            await check(url, wait=60.0)
        assert await check(url, ca_file=file) == ()
    finally:
        await runner.cleanup()
