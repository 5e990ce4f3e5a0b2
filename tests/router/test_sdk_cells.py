"""Every API, whole and streamed, with every failure of a hand-off, behind the router."""

import asyncio

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.settings import Settings

from ..sidecar.cells import CELLS, FAILURES, Cell, Who, check
from ..sidecar.fake_vllm import Act, Answering, complete, script
from ..sidecar.peers import hangs
from ..sidecar.sdks import Server
from .conftest import LOOPBACK, Harness, until

pytestmark = pytest.mark.component

ROUTED = [
    cell
    for cell in CELLS
    # The sidecar's cells show how the load client reads each answer.
    if (cell.who is Who.SDK or cell.kind is RequestKind.GENERATE)
    # Another backend serves a request whose engine hangs before its first byte: `real` has these.
    and (cell.stream or not cell.failure.hangs)
]


@pytest.mark.parametrize("cell", ROUTED, ids=str)
async def test_the_client_gets_the_answer_or_its_own_error(harness: Harness, cell: Cell) -> None:
    failure = cell.failure
    prefill = await harness.prefill("p", failure.prefill and script(failure.prefill))
    decode = await harness.decode("d", script(failure.decode))
    settings = Settings(listen=LOOPBACK, admin=LOOPBACK, **failure.settings)
    timeout = f"{1000 * settings.prefill_timeout:.0f}ms"
    await harness.start({"prefill_timeout": timeout}, settings=settings)
    if failure.refuses:
        prefill.close_port()
    if failure.hangs:
        decode.health = hangs
    server = Server(harness.url(""))
    checked = asyncio.create_task(check(cell, server))
    lifecycle = harness.router.components.lifecycle
    if failure.drains:
        phase = "answering" if cell.stream else "decoding"
        await until(lambda: phase in [work.describe()["phase"] for work in lifecycle.work])
        lifecycle.drain()
    await checked


BEFORE_A_TOKEN = ["decode dies before the first byte", "decode dies after its preamble"]


@pytest.mark.parametrize("kind", RequestKind)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("name", BEFORE_A_TOKEN)
async def test_another_backend_answers_what_failed_before_a_token(
    harness: Harness, kind: RequestKind, stream: bool, split: bool, name: str
) -> None:
    failing, served = FAILURES[name].decode, []

    def once(backend: str) -> Act:
        async def act(turn: Answering) -> None:
            served.append(backend)
            await (failing if backend == served[0] else complete)(turn)

        return act

    await harness.prefill("p")
    for backend in ("d-0", "d-1"):
        await harness.decode(backend, script(once(backend)))
    await harness.start({"enabled": split})
    cell = Cell(Who.LOAD_CLIENT, kind, stream, "nothing fails")
    await check(cell, Server(harness.url("")))
    assert set(served) == {"d-0", "d-1"}
