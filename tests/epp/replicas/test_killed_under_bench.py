"""`tandem bench` through Envoy and two EPPs, of which one is killed under load: what is lost."""

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from tandem_loadtest.figures.files import load_report
from tandem_loadtest.figures.model import Repeat
from tandem_operator.routing.envoy.http_filters import BodyMode

from ..envoy.test_replicas_with_envoy import two_epps
from ..real import Backend

pytestmark = pytest.mark.component

TOKENS = 20
TOKEN_SECONDS = 0.05
RATE = 20
"""Requests per second: each takes a second, so some 20 are in progress."""
SECONDS = 4

KILL = """
import os, urllib.request
held = 0
# Until it holds what it does on average.
while held < {least}:
    page = urllib.request.urlopen("http://127.0.0.1:{metrics}/metrics").read().decode()
    lines = [line for line in page.splitlines() if line.startswith("{in_flight}")]
    held = sum(float(line.split()[-1]) for line in lines)
os.kill({pid}, 9)
print(held)
"""


@dataclass
class StreamingBackend(Backend):
    """Streams completions at the pace of an engine."""

    async def serve(self, request: web.Request) -> web.StreamResponse:
        if request.method == "GET":
            listed = {"data": [{"id": "m"}]}
            is_list = request.path == "/v1/models"
            return web.json_response(listed) if is_list else web.Response(text=self.page())
        await request.read()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(1, TOKENS + 1):
            await asyncio.sleep(TOKEN_SECONDS)
            reason = "length" if number == TOKENS else None
            choice = {"index": 0, "text": "a", "finish_reason": reason}
            await write(response, {"choices": [choice]})
        usage = {"prompt_tokens": 8, "completion_tokens": TOKENS}
        await write(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def write(response: web.StreamResponse, event: object) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def bench_with_kill(tmp_path: Path, mode: BodyMode) -> tuple[Repeat, int]:
    """The run of `tandem bench`, and how many requests the killed EPP had placed just before."""
    backends = [StreamingBackend("b1"), StreamingBackend("b2")]
    report = tmp_path / "report.json"
    async with two_epps(tmp_path, mode, backends) as stack:
        victim = stack.epps[0]
        script = tmp_path / "kill.py"
        script.write_text(
            KILL.format(
                metrics=victim.metrics,
                pid=victim.process.pid,
                in_flight="tandem_epp_in_flight{",
                least=RATE * TOKENS * TOKEN_SECONDS / 2,
            )
        )
        bench = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "tandem_cli", "bench", stack.url, "--model", "m",
            "--rate", str(RATE), "--duration", f"{SECONDS}s", "--warm-up", "2",
            "--prompt-tokens", "8", "--output-tokens", str(TOKENS), "--json", str(report),
            "--at", f"{SECONDS / 4}s", f"{sys.executable} {script}",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        output, _ = await bench.communicate()
        assert report.exists(), output.decode()
        (repeat,) = load_report(report).repeats
        (event,) = repeat.events
        return repeat, int(float(event.output))


@pytest.mark.parametrize("mode", ["BUFFERED", "FULL_DUPLEX_STREAMED"])
async def test_what_a_killed_replica_loses(tmp_path: Path, mode: BodyMode) -> None:
    repeat, held = await bench_with_kill(tmp_path, mode)
    outcomes, sent = repeat.all.outcomes, repeat.all.requests
    assert sent > RATE * SECONDS / 2
    if mode == "BUFFERED":
        assert outcomes == {"ok": sent}
        return
    assert set(outcomes) <= {"ok", "connection-lost", "error-status"}
    # The answers in progress. Between the count and the kill requests are placed, and on a busy
    # machine up to half of them have ended.
    assert held / 3 <= outcomes["connection-lost"] <= held + RATE / 4
    # Those that find the EPP gone: the first one removes it from Envoy's cluster.
    assert outcomes.get("error-status", 0) <= RATE / 4
