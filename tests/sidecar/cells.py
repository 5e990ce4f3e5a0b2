"""Each failure of a hand-off: what fails, and what clients of each API must get.

    await check_all(by_title(CELLS)["drain expires"], server, lifecycle)

checks the answers or the errors. The test has started a sidecar or a router, with `settings` of the
cells and with engines that act as their `failure` says.
"""

import asyncio
import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.handoff.context import Lifecycle
from tandem_sidecar.settings import Breaker, Policy

from .fake_vllm import WORDS, Act, Answering, Content, complete
from .replies import EXPECTED, FIELDS, REPLIES
from .sdks import PROMPT, SDK_ERRORS, SDKS, LoadClientError, Server, ask_load_client

TEXT: Final = "".join(WORDS)
"""The right answer."""


class Who(StrEnum):
    """Which client asks."""

    SDK = "sdk"
    LOAD_CLIENT = "load client"


def answers(status: int) -> Act:
    async def act(turn: Answering) -> None:
        turn.answer(status, b'{"error": {"message": "scripted", "code": %d}}' % status)

    return act


async def hangs(turn: Answering) -> None:
    await turn.gone.wait()


async def dies(turn: Answering) -> None:
    turn.die()


async def without_params(turn: Answering) -> None:
    turn.answer(200, b'{"id": "1", "choices": [], "kv_transfer_params": null}')


async def cannot_load(turn: Answering) -> None:
    """Fail what reads KV, as vLLM does with the policy `fail`; compute what does not."""
    if turn.reads_kv:
        turn.fail()
    else:
        turn.complete()


async def cannot_load_with_error_event(turn: Answering) -> None:
    """The same, with the error event of OpenAI's form after the preamble of every API."""
    if turn.reads_kv and turn.streams:
        turn.stream()
        error = b'data: {"error": {"message": "Internal server error", "code": 500}}\n\n'
        turn.write(*turn.events.preamble)
        turn.chunk(error)
        turn.end()
    else:
        await cannot_load(turn)


async def begins(turn: Answering) -> None:
    """Send two tokens of a stream; of another answer nothing."""
    if turn.streams:
        turn.stream()
        turn.write(*turn.events.preamble, *turn.events.tokens[:2])


async def dies_in_the_middle(turn: Answering) -> None:
    await begins(turn)
    if not turn.streams:
        turn.send(b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{")
    turn.writer.close()


async def dies_after_its_preamble(turn: Answering) -> None:
    if turn.streams:
        turn.stream()
        turn.write(*turn.events.preamble)
    turn.writer.close()


async def hangs_in_the_middle(turn: Answering) -> None:
    await begins(turn)
    await turn.gone.wait()


async def fails_in_the_middle(turn: Answering) -> None:
    """The engine itself fails the request, and says so."""
    if not turn.streams:
        turn.fail()
        return
    turn.stream()
    turn.write(*turn.events.preamble, *turn.events.tokens[:2])
    turn.give_up()


@dataclass(frozen=True)
class Failure:
    """What fails, and what the client gets."""

    error: str | None = None
    """Words of the error that the client gets; None: the right answer."""
    whole_error: str | None = None
    """The same of an answer that is not streamed, if it differs."""
    prefill: Act | None = None
    """How the prefill engine answers; None: well."""
    decode: Act = complete
    refuses: bool = False
    """Whether the prefill engine's port is closed."""
    hangs: bool = False
    """Whether the decode engine answers no `/health` either."""
    drains: bool = False
    """Whether a drain begins, and expires, while the decode engine is at work."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the sidecar that differ."""
    strict_error: str | None = None
    """Words of the error without the fallback, if it then is one; else it changes nothing."""


FAILURES: Final[Mapping[str, Failure]] = {
    "nothing fails": Failure(),
    "prefill refuses the connection": Failure(refuses=True, strict_error="prefill by"),
    "prefill answers 500": Failure(prefill=answers(500), strict_error="answered 500"),
    "prefill times out": Failure(
        prefill=hangs, settings={"prefill_timeout": 0.3}, strict_error="no prefill within 0.3s"
    ),
    "prefill answers 400": Failure(prefill=answers(400)),
    "prefill answers 404": Failure(prefill=answers(404)),
    "prefill answers 429": Failure(prefill=answers(429), strict_error="busy (429)"),
    "prefill answers 503": Failure(prefill=answers(503), strict_error="busy (503)"),
    "prefill answers without usable params": Failure(
        prefill=without_params, strict_error="kv_transfer_params"
    ),
    "KV load fails": Failure(decode=cannot_load, strict_error=""),
    "KV load fails with an error event": Failure(
        decode=cannot_load_with_error_event, strict_error=""
    ),
    "decode dies before the first byte": Failure("decode failed", decode=dies),
    "decode dies after its preamble": Failure("decode failed", decode=dies_after_its_preamble),
    "decode dies in mid-stream": Failure("decode failed", "", decode=dies_in_the_middle),
    "decode fails in mid-stream": Failure("", decode=fails_in_the_middle),
    "decode hangs in mid-stream": Failure(
        "no sign of life", decode=hangs_in_the_middle, hangs=True, settings={"silence_timeout": 0.3}
    ),
    "drain expires": Failure(
        "shutting down", decode=hangs_in_the_middle, drains=True, settings={"drain_timeout": 0.2}
    ),
}


@dataclass(frozen=True)
class Cell:
    """Who asks which API, and how; and what fails."""

    who: Who
    kind: RequestKind
    stream: bool
    name: str
    """Of its failure."""
    falls_back: bool = True
    """Whether a request whose prefill fails falls back to the decode engine."""

    @property
    def failure(self) -> Failure:
        return FAILURES[self.name]

    @property
    def words(self) -> str | None:
        """Words of the error that the client gets; None: it gets the right answer."""
        failure = self.failure
        if not self.falls_back and failure.strict_error is not None:
            return failure.strict_error
        whole = failure.whole_error
        return failure.error if self.stream or whole is None else whole

    @property
    def settings(self) -> dict[str, Any]:
        """Settings of the sidecar that differ."""
        policy = Policy(fallback_to_unified=self.falls_back)
        # Of many requests each one is to meet the failure.
        return {"policy": policy, "breaker": Breaker(failures=1000), **self.failure.settings}

    @property
    def title(self) -> str:
        """What fails, and whether the request falls back."""
        return self.name if self.falls_back else f"{self.name}, no fallback"

    def __str__(self) -> str:
        return f"{self.who}-{self.kind}-{'stream' if self.stream else 'whole'}-{self.title}"


CELLS: Final = [
    Cell(who, kind, stream, name, falls_back)
    for who in Who
    for kind in (SDKS if who is Who.SDK else RequestKind)
    for stream in (True, False)
    for name, failure in FAILURES.items()
    # What happens after a prefill that succeeded is the same with the fallback as without it.
    for falls_back in (
        (True, False) if failure.prefill or failure.strict_error is not None else (True,)
    )
]


def by_title(cells: Iterable[Cell]) -> dict[str, list[Cell]]:
    """Those with the same failure and settings, which one server can have."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        groups.setdefault(cell.title, []).append(cell)
    return groups


async def check_all(cells: list[Cell], server: Server, lifecycle: Lifecycle) -> None:
    """Check the cells of one failure at the same time, at the server whose `lifecycle` this is."""
    async with asyncio.TaskGroup() as clients:
        for cell in cells:
            clients.create_task(check(cell, server))
        if cells[0].failure.drains:
            phases = Counter("answering" if cell.stream else "decoding" for cell in cells)
            async with asyncio.timeout(20):
                while Counter(work.describe()["phase"] for work in lifecycle.work) != phases:
                    await asyncio.sleep(0.01)
            lifecycle.drain()


async def check(cell: Cell, server: Server) -> None:
    """The client gets the right answer, or an error of its own type that says what happened."""
    if cell.words is None:
        assert await ask(cell, server) == TEXT, cell
        return
    with pytest.raises(SDK_ERRORS if cell.who is Who.SDK else LoadClientError) as raised:
        await ask(cell, server)
    assert cell.words in str(raised.value), cell


async def check_contents(name: str, server: Server) -> None:
    """The same of every content of each API's answers, with its usage, where `name` fails."""
    async with asyncio.TaskGroup() as group:
        for kind, contents in FIELDS.items():
            for content, stream in itertools.product(contents, (True, False)):
                cell = Cell(Who.SDK, kind, stream, name)
                group.create_task(_check_content(cell, content, server))


async def _check_content(cell: Cell, content: Content, server: Server) -> None:
    asking = REPLIES[cell.kind](server, content, cell.stream)
    if cell.words is None:
        assert await asking == EXPECTED[content], (cell, content)
        return
    with pytest.raises(SDK_ERRORS) as raised:
        await asking
    assert cell.words in str(raised.value), (cell, content)


async def ask(cell: Cell, server: Server) -> str:
    """The text that the client gets."""
    if cell.who is Who.LOAD_CLIENT:
        return await ask_load_client(server, cell.kind, stream=cell.stream)
    return await SDKS[cell.kind](server, PROMPT, len(WORDS), cell.stream)
