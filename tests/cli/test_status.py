import asyncio
import json
import os
import pty
import signal
import sys
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace
from rich.console import Console

from tandem_cli.stack_tables import tables
from tandem_contract import endpoints
from tandem_contract.paths import Role, RoutingPath
from tandem_local.stack_metrics import scrape_stack
from tandem_local.state import PodState, RunDir, State

from ..sidecar.peers import FakeDecode
from ..sidecar.processes import sidecar
from .helpers import tandem

pytestmark = pytest.mark.component

STATE = State(
    1,
    "http://127.0.0.1:8080",
    (
        PodState("decode-0", Role.DECODE, "tiny", "127.1.1.1", True, 2, {"engine": 5}),
        PodState("epp", None, "", "127.1.1.2", False, 0, {}),
    ),
)


async def test_tables(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.write(STATE)
        code, out, _ = await tandem("status", "--run-dir", str(tmp_path))
    assert code == 1, "the EPP is not ready"
    rows = [line.split() for line in out.splitlines()]
    assert ["decode-0", "decode", "tiny", "yes", "2", "-", "-", "-"] in rows
    assert ["epp", "router", "-", "no", "0", "-", "-", "-"] in rows
    assert "http://127.0.0.1:8080" in out


async def test_json(tmp_path: Path) -> None:
    with RunDir(tmp_path) as run_dir:
        run_dir.write(STATE)
        code, out, _ = await tandem("status", "--run-dir", str(tmp_path), "-o", "json")
    report = json.loads(out)
    assert code == 1
    assert report["paths"] == {}
    assert report["pods"][0]["role"] == "decode"
    assert report["pods"][0]["running"] is None


async def test_the_page_says_since_when_a_sidecar_counts_that_was_killed() -> None:
    pages = []
    async with FakeDecode() as engine, aiohttp.ClientSession() as http:
        for requests in (2, 1):
            async with sidecar("--engine", f"http://{engine.address}") as process:
                for _ in range(requests):
                    async with http.post(process.url(), json={"prompt": "p"}) as answer:
                        assert answer.status == 200
                url = process.admin_url(endpoints.METRICS)
                pod = PodState("d", Role.DECODE, "m", "127.1.1.1", True, 0, {}, None, url)
                pages.append(await scrape_stack(State(1, "http://x", (pod,))))
    assert [page.paths[RoutingPath.UNIFIED] for page in pages] == [2, 1]
    starts = [page.pods[0].counts_since for page in pages]
    assert starts == sorted(set(starts))
    for page, start in zip(pages, starts, strict=True):
        console = Console(width=160, record=True, file=StringIO())
        console.print(tables(page))
        when = datetime.fromtimestamp(start, UTC).isoformat(" ", "seconds")
        assert f"the last one, of d, started at {when}." in console.export_text()


async def test_no_stack(tmp_path: Path) -> None:
    code, out, err = await tandem("status", "--run-dir", str(tmp_path))
    assert (code, out) == (1, "")
    assert err.startswith(f"error: no stack runs in {tmp_path}: start one with tandem up")


async def wait_for_text(screen: int, text: bytes) -> None:
    """Read from a terminal until it shows `text`."""
    output = b""
    async with asyncio.timeout(30):
        while text not in output:
            output += await asyncio.to_thread(os.read, screen, 4096)


async def test_watch_refreshes_until_interrupted(tmp_path: Path) -> None:
    screen, terminal = pty.openpty()
    with RunDir(tmp_path) as run_dir:
        run_dir.write(STATE)
        process = await asyncio.create_subprocess_exec(
            # A process inherits ignored signals; the parent of the tests may ignore SIGINT.
            *("env", "--default-signal=INT", sys.executable, "-m", "tandem_cli"),
            *("status", "--watch", "--run-dir", str(tmp_path)),
            stdout=terminal,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "160", "LINES": "40"},
        )
        os.close(terminal)
        try:
            await wait_for_text(screen, b"decode-0")
            run_dir.write(replace(STATE, pods=(replace(STATE.pods[0], name="decode-7"),)))
            await wait_for_text(screen, b"decode-7")
            process.send_signal(signal.SIGINT)
            await wait_for_text(screen, b"\x1b[?1049l")
            assert await process.wait() == 0
        finally:
            if process.returncode is None:
                process.kill()
            os.close(screen)


async def test_watch_and_json_exclude_each_other(tmp_path: Path) -> None:
    code, out, err = await tandem("status", "--watch", "-o", "json", "--run-dir", str(tmp_path))
    assert (code, out) == (2, "")
    assert "-o json and --watch exclude each other" in err
