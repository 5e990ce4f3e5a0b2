"""`tandem profile` on a paced server, and `tandem plan` with what it wrote."""

import asyncio
import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from click.testing import CliRunner, Result

from tandem_cli.main import main
from tandem_cli.profile.file import HeldOut, ProfileFile, read_profile, write_profile
from tandem_planner.sizing.profile import DecodePoint, PrefillPoint

from ...loadtest.servers import serving
from ..bench.servers import in_thread

PACE = 0.002
"""Seconds between two tokens: they come in reads of their own."""


class PacedServer:
    """Streams as many tokens as are asked for, and counts requests."""

    def __init__(self) -> None:
        self.prompts: list[int] = []
        self.status = 200

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.prompts.append(len(body["prompt"]))
        if self.status != 200:
            return web.Response(status=self.status)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        count = body["max_tokens"]
        for i in range(count):
            await asyncio.sleep(PACE)
            finish = "length" if i == count - 1 else None
            await _event(
                response, {"choices": [{"index": 0, "text": "a", "finish_reason": finish}]}
            )
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": count}
        await _event(response, {"choices": [], "usage": usage})
        await response.write(b"data: [DONE]\n\n")
        return response


async def _event(response: web.StreamResponse, event: dict[str, Any]) -> None:
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


def background(server: PacedServer) -> AbstractContextManager[str]:
    """The URL of `server`, which serves in a thread: the command has an event loop of its own."""
    return in_thread(serving(server.handle), asyncio.new_event_loop())


def run(*args: str) -> Result:
    return CliRunner().invoke(main, [*args])


def points(longest: int = 4096) -> ProfileFile:
    """A whole profile of an engine of which each step takes 20 ms and a token 0.1 ms."""
    return ProfileFile(
        model="m",
        url="http://engine",
        prefills=[PrefillPoint(n, 0.02 + 1e-4 * n) for n in (64, 512, longest)],
        decodes=[DecodePoint(n, 500.0, 0.02 + 1e-4 * n) for n in (1, 8, 32)],
        held_out=HeldOut(50, 0.1, 0.2, 0.05, 0.1),
    )


@pytest.mark.component
def test_a_profile_measures_every_point_and_says_how_exact_it_is(tmp_path: Path) -> None:
    file, server = tmp_path / "p.json", PacedServer()
    with background(server) as url:
        args = (
            "profile", url, "--model", "m", "--longest", "200", "--most", "4", "--held-out", "1s",
            "-o", str(file),
        )  # fmt: skip
        result = run(*args)
        assert result.exit_code == 0, result.output
        assert "held out, " in result.stdout
        assert f"written to {file}" in result.stdout
        profile = read_profile(file)
        assert [point.tokens for point in profile.prefills] == [64] * 3 + [128] * 3 + [200] * 3
        assert [point.decodes for point in profile.decodes] == [1, 1, 4, 4]
        assert all(point.seconds >= PACE / 2 for point in profile.decodes)
        assert profile.held_out is not None
        # What the file has is not measured again; other engines do not go into it.
        profile.held_out, profile.decodes = None, profile.decodes[:2]
        write_profile(file, profile)
        before = len(server.prompts)
        assert run(*args).exit_code == 0
        sent = server.prompts[before:]
        assert len(sent) < before
        assert len(read_profile(file).prefills) == 9
        other = run("profile", url, "--model", "other", "-o", str(file))
        assert other.exit_code == 1
        assert "remove it, or write" in other.stderr


@pytest.mark.component
def test_a_server_that_fails_ends_the_profile_with_a_line(tmp_path: Path) -> None:
    server = PacedServer()
    server.status = 500
    with background(server) as url:
        result = run("profile", url, "--model", "m", "-o", str(tmp_path / "p.json"))
    assert result.exit_code == 1
    assert "a prompt of 16 tokens failed: HTTP 500" in result.stderr


@pytest.mark.long
def test_a_plan_with_a_profile_is_calibrated_and_its_bounds_are_the_profiles_errors(
    tmp_path: Path,
) -> None:
    file = tmp_path / "p.json"
    write_profile(file, points())
    result = run(
        "plan", "llama-3.1-8b", "--gpu", "h100", "--workload", "fixed", "--rate", "4",
        "--profile", str(file), "--json", "-",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    assert answer["is_calibrated"]
    itl = answer["options"][0]["figures"]["itl_p50"]
    assert itl["value"] > 0.02
    assert itl["low"] > 0.85 * itl["value"]


def test_beyond_its_profile_a_plan_is_unknown(tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    write_profile(file, points(longest=100))
    args = ("plan", "llama-3.1-8b", "--gpu", "h100", "--workload", "rag", "--rate", "1")
    result = run(*args, "--profile", str(file))
    assert result.exit_code == 2
    assert "unknown: the workload has prompts of" in result.stderr
    file.write_text("{}")
    result = run(*args, "--profile", str(file))
    assert result.exit_code == 2
    assert "no profile" in result.stderr
