"""What large request bodies do to others: how long a body stalls other streams, and how much memory
uploads that stall take.

One EPP with its defaults and ten pods. A client sends 16 MB bodies of several kinds, as a gateway
does in FULL_DUPLEX_STREAMED and BUFFERED mode, while a second one sends a response chunk on another
connection again and again and waits for its answer: the longest wait is the stall. Then 200 uploads
of 15 MB stop before their end. Everything runs on this machine's cores, so the longest wait without
any body is printed too.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from subprocess import PIPE
from time import sleep
from typing import Final

import anyio
import click

from tandem_epp.server.ext_proc.messages import BodyMode
from tandem_local.ports import free_port

from .blocking_client import Client, body_message, head_message
from .epp_stacks import PODS, router
from .figures import Figure, at_most, progress, report, without_target
from .proxies import Server, server

SIZE: Final = 16_000_000
"""Bytes of a body; the EPP takes 16 MiB."""
UPLOADS: Final = 200
UPLOAD_SIZE: Final = 15_000_000
_HOST: Final = "127.0.0.1"
_CHUNK: Final = 62 * 1024
FORM: Final = "multipart/form-data; boundary=bench-boundary"
_WORDS: Final = "the quick brown fox jumps over a lazy dog "


def bodies() -> Iterator[tuple[str, str, bytes]]:
    """Name, path and content of each kind of body."""
    chat, completions = "/v1/chat/completions", "/v1/completions"
    text = _WORDS * (SIZE // len(_WORDS))

    def turns(contents: list[object]) -> bytes:
        messages = [{"role": "user", "content": content} for content in contents]
        return json.dumps({"model": "bench", "messages": messages}).encode()

    yield "one text", chat, turns([text])
    yield "200,000 turns", chat, turns(["a few words"] * 200_000)
    image = {"url": "data:image/png;base64," + "A" * (SIZE - 1000)}
    yield "an image", chat, turns([[{"type": "image_url", "image_url": image}]])
    yield "18,000 parts", chat, turns([[{"type": "text", "text": "x" * 800}] * 18_000])
    ids = json.dumps(list(range(1000, 1000 + SIZE // 9)))
    yield "token ids", completions, f'{{"model": "bench", "prompt": {ids}}}'.encode()
    yield "empty lists", completions, b'{"model": "bench", "x": [' + b"[]," * (SIZE // 3) + b"1]}"
    yield "no JSON", completions, b'{"model": "bench", "x": [' + b"1," * (SIZE // 2)
    asked = json.dumps({"model": "bench", "input": text}).encode()
    yield "a response's input", "/v1/responses", asked
    yield "a text to embed", "/v1/embeddings", asked
    yield "a message", "/v1/messages", turns([text])
    yield (
        "ids to generate",
        "/inference/v1/generate",
        f'{{"model": "bench", "token_ids": {ids}}}'.encode(),
    )
    audio = "/v1/audio/transcriptions"
    yield "a form", audio, _form(b"sound " * (SIZE // 6))
    # Each line looks like the beginning of a boundary.
    yield "a form of dashes", audio, _form(b"\r\n--bench-boundar " * (SIZE // 19))


def _form(file: bytes) -> bytes:
    head = b'--bench-boundary\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
    return head % (b"file", file) + head % (b"model", b"bench") + b"--bench-boundary--\r\n"


class Probe:
    """`benchmarks.blocking_client` in a process of its own, which measures all the time."""

    def __init__(self, port: int) -> None:
        command = (sys.executable, "-m", "benchmarks.blocking_client", str(port))
        self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True)
        self._line()

    def longest(self, action: Callable[[], None]) -> float:
        """The longest wait in milliseconds while `action` runs, and for a while after it."""
        self._line()
        action()
        sleep(0.2)
        return 1e3 * self._line()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()

    def _line(self) -> float:
        """The longest wait since the last call, in seconds."""
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("the probe has no pipes")
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def post(port: int, mode: BodyMode, path: str, content: bytes) -> None:
    """Send a request and wait for all of its answers."""
    client = Client(port)
    content_type = FORM if path.startswith("/v1/audio/") else "application/json"
    stream = client.open(head_message(path, end=False, mode=mode, content_type=content_type))
    if mode is BodyMode.BUFFERED:
        client.answer(stream)
        client.send(stream, body_message(content, end=True))
        client.answer(stream)
    else:
        for at in range(0, len(content), _CHUNK):
            end = at + _CHUNK >= len(content)
            client.send(stream, body_message(content[at : at + _CHUNK], end=end))
        while not client.is_last(client.answer(stream)):
            pass
    client.close()


def stalls(port: int, rounds: int) -> Iterator[Figure]:
    """The longest waits."""
    probe = Probe(port)
    idle = [probe.longest(lambda: None) for _ in range(rounds)]
    yield without_target("longest wait without a body", idle, "ms")
    for name, path, content in bodies():
        for mode in (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED):
            label = f"{len(content) / 1e6:.0f} MB, {name}, {mode.name}"
            progress(label)
            send = partial(post, port, mode, path, content)
            send()
            waits = [probe.longest(send) for _ in range(rounds)]
            yield at_most(f"longest wait beside {label}", waits, "ms", 20)
    probe.close()


def uploads(epp: Server) -> Iterator[Figure]:
    """The memory that stalled uploads take, and how many were refused."""
    before = epp.resident()
    chunk = body_message(b"x" * _CHUNK, end=False)
    clients, statuses = [], []
    for number in range(UPLOADS):
        progress(f"stalled upload {number + 1} of {UPLOADS}") if number % 50 == 0 else None
        client = Client(epp.port)
        stream = client.open(head_message("/v1/completions", end=False))
        for _ in range(UPLOAD_SIZE // _CHUNK):
            client.send(stream, chunk)
            if client.has_answer():
                statuses.append(client.answer(stream).immediate_response.status.code)
                break
        clients.append(client)
    name = f"{UPLOADS} stalled uploads of {UPLOAD_SIZE / 1e6:.0f} MB"
    yield without_target(f"{name}: answered with 503", statuses.count(503), "requests")
    yield at_most(f"{name}: RSS over before", epp.resident() - before, "MB", 600)
    for client in clients:
        client.close()


@contextmanager
def _scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


@asynccontextmanager
async def running_epp(scratch: Path) -> AsyncIterator[tuple[Server, int]]:
    """An EPP with its defaults and ten pods, and the port of its metrics."""
    engine, port, metrics = (free_port(_HOST) for _ in range(3))
    file = scratch / "router.yaml"
    configuration = router([f"127.0.0.1:{engine}"] * PODS)
    # Pods of two models: otherwise a form's model would not be looked for.
    configuration["backends"][0]["models"] = ["bench", "other"]
    file.write_text(json.dumps(configuration))
    command = (
        *(sys.executable, "-m", "tandem_epp", "--config", str(file), "--no-warm-up"),
        *("--listen", f"{_HOST}:{port}", "--health", f"{_HOST}:{free_port(_HOST)}"),
        *("--metrics", f"{_HOST}:{metrics}", "--log-level", "warning"),
    )
    fake = (sys.executable, "-m", "benchmarks.fake_engine", str(engine))
    async with (
        server("engine", engine, fake, scratch / "engine.log"),
        server("epp", port, command, scratch / "epp.log") as epp,
    ):
        yield epp, metrics


async def measure(rounds: int) -> list[Figure]:
    """All figures."""
    with _scratch() as scratch:
        async with running_epp(scratch) as (epp, _):
            results = await anyio.to_thread.run_sync(lambda: list(stalls(epp.port, rounds)))
            return results + await anyio.to_thread.run_sync(lambda: list(uploads(epp)))


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
@click.option("--rounds", default=3, show_default=True, help="rounds; a figure is their median")
def main(file: Path | None, rounds: int) -> None:
    """Measure what large bodies do to other streams and to memory."""
    report(anyio.run(measure, rounds), file)


if __name__ == "__main__":
    main()
