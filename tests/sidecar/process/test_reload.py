"""Reloading settings while requests run."""

import asyncio
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tandem_contract.commandline import HostPort
from tandem_sidecar.main import main
from tandem_sidecar.process.reload import LIVE, BadConfiguration, Reloader, Source, compare
from tandem_sidecar.settings import Settings

from ..peers import FakeDecode, Turn
from ..processes import sidecar

ADDRESS = HostPort("127.0.0.1", 0)


def settings(flags: Any) -> Settings:
    return Settings(ADDRESS, ADDRESS, ADDRESS, retries=flags["retries"])


def retries_in(file: Path) -> Callable[[], dict[str, Any]]:
    def read() -> dict[str, Any]:
        try:
            return {"retries": int(file.read_text())}
        except (OSError, ValueError) as err:
            raise BadConfiguration(f"{file}:1: not a number") from err

    return read


def test_every_live_flag_exists() -> None:
    assert {flag.name for flag in main.params} >= LIVE


def test_flags_that_are_not_live_wait_for_a_restart() -> None:
    old = {"retries": 1, "listen": "a", "history": 5}
    change = compare(old, {"retries": 2, "listen": "b", "history": 5})
    assert change.flags == {"retries": 2, "listen": "a", "history": 5}
    assert (change.live, change.waiting) == (("retries",), ("listen",))


def test_a_changed_file_is_read_once_stable_and_a_bad_one_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "c"
    file.write_text("1")
    applied: list[int] = []
    source = Source(file, {"retries": 1}, retries_in(file), settings)
    reloader = Reloader(source, lambda new: applied.append(new.retries))
    reloader.check()
    reloader.check()
    assert applied == []
    file.write_text("22")
    reloader.check()
    assert applied == [], "the file may still be written"
    reloader.check()
    reloader.check()
    assert applied == [22]
    file.write_text("bad")
    for _ in range(3):
        reloader.check()
    file.unlink()
    for _ in range(3):
        reloader.check()
    assert applied == [22]
    errors = [line.message for line in caplog.records if line.levelname == "ERROR"]
    assert (
        errors
        == [f"settings not reloaded, the current ones stay in use: {file}:1: not a number"] * 2
    )


def test_a_config_maps_symbolic_links_are_followed(tmp_path: Path) -> None:
    for version in ("1", "2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "c").write_text(version)
        os.utime(tmp_path / version / "c", (1, 1))
    (tmp_path / "..data").symlink_to("1")
    (tmp_path / "c").symlink_to("..data/c")
    applied: list[int] = []
    source = Source(tmp_path / "c", {"retries": 1}, retries_in(tmp_path / "c"), settings)
    reloader = Reloader(source, lambda new: applied.append(new.retries))
    (tmp_path / "..tmp").symlink_to("2")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    reloader.check()
    reloader.check()
    assert applied == [2]


@pytest.mark.component
async def test_a_stream_continues_over_a_reload_and_the_next_request_uses_it(
    tmp_path: Path,
) -> None:
    go = asyncio.Event()

    async def script(turn: Turn) -> None:
        turn.stream()
        turn.event("first")
        await go.wait()
        turn.event("[DONE]")
        turn.end()

    file = tmp_path / "c.yaml"
    file.write_text("max-body: 1MiB\n")
    large = b'{"prompt": "%s"}' % (b"x" * 2000)
    async with (
        FakeDecode(script) as decode,
        sidecar("--config", str(file), "--engine", f"http://{decode.address}") as server,
        aiohttp.ClientSession() as http,
        http.post(server.url(), data=large) as running,
    ):
        await running.content.readuntil(b"\n\n")
        file.write_text("max-body: 1KiB\npeer-port: 5\nlog-format: json\n")
        server.process.send_signal(signal.SIGHUP)
        log_line = await server.wait_for_log("settings reloaded")
        changes = "--log-format text -> json, --max-body 1048576 -> 1024"
        assert log_line.endswith(f"{changes}; not before a restart: --peer-port\n")
        async with http.post(server.url(), data=large) as refused:
            assert refused.status == 413
        file.write_text("max-body: 1MiB\nretries: many\n")
        server.process.send_signal(signal.SIGHUP)
        assert (
            f"{file}:2: retries: "
            in json.loads(await server.wait_for_log("not reloaded"))["message"]
        )
        async with http.post(server.url(), data=large) as refused:
            assert refused.status == 413
        go.set()
        assert await running.content.read() == b"data: [DONE]\n\n"
