import asyncio
import json
import os
import pty
import signal
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from tandem_contract.paths import Role
from tandem_local.state import PodState, RunDir, State

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
