"""Every API, whole and streamed, with every failure of a hand-off, behind the router."""

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.settings import Settings

from ..sidecar.cells import CELLS, FAILURES, Cell, Who, by_title, check, check_all, check_contents
from ..sidecar.fake_vllm import Act, Answering, complete, script
from ..sidecar.peers import hangs
from ..sidecar.sdks import Server
from .conftest import LOOPBACK, Harness

pytestmark = pytest.mark.component

ROUTED = [
    cell
    for cell in CELLS
    # The sidecar's cells show how the load client reads each answer.
    if (cell.who is Who.SDK or cell.kind is RequestKind.GENERATE)
    # Another backend serves a request whose engine hangs before its first byte: `real` has these.
    and (cell.stream or not cell.failure.hangs)
]
BY_TITLE = by_title(ROUTED)


@pytest.mark.parametrize("cells", BY_TITLE.values(), ids=BY_TITLE)
async def test_clients_get_the_answer_or_an_error_of_their_own(
    harness: Harness, cells: list[Cell]
) -> None:
    """All of them ask one router at the same time."""
    failure = cells[0].failure
    prefill = await harness.prefill("p", failure.prefill and script(failure.prefill))
    decode = await harness.decode("d", script(failure.decode))
    settings = Settings(listen=LOOPBACK, admin=LOOPBACK, **cells[0].settings)
    timeout = f"{1000 * settings.prefill_timeout:.0f}ms"
    serving = {"prefill_timeout": timeout, "fallback_to_unified": cells[0].falls_back}
    await harness.start(serving, settings=settings)
    if failure.refuses:
        prefill.close_port()
    if failure.hangs:
        decode.health = hangs
    await check_all(cells, Server(harness.url("")), harness.router.components.lifecycle)


@pytest.mark.parametrize("name", ["nothing fails", "KV load fails"])
async def test_choices_tool_calls_reasoning_and_usage(harness: Harness, name: str) -> None:
    await harness.prefill("p")
    await harness.decode("d", script(FAILURES[name].decode))
    await harness.start()
    await check_contents(name, Server(harness.url("")))


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
