"""Every API, whole and streamed, with every failure of a hand-off, by clients that users have."""

import pytest

from ..cells import CELLS, FAILURES, Cell, by_title, check_all, check_contents
from ..conftest import Harness
from ..fake_vllm import script
from ..peers import hangs
from ..sdks import Server

pytestmark = pytest.mark.component

BY_TITLE = by_title(CELLS)


@pytest.mark.parametrize("cells", BY_TITLE.values(), ids=BY_TITLE)
async def test_clients_get_the_answer_or_an_error_of_their_own(
    harness: Harness, cells: list[Cell]
) -> None:
    """All of them ask one sidecar at the same time."""
    failure = cells[0].failure
    prefill = await harness.prefill(failure.prefill and script(failure.prefill))
    if failure.refuses:
        prefill.close_port()
    await harness.start(script(failure.decode), **cells[0].settings)
    if failure.hangs:
        harness.decode.health = hangs
    server = Server(harness.url(""), harness.candidates)
    await check_all(cells, server, harness.sidecar.lifecycle)


@pytest.mark.parametrize(
    "name",
    [
        "nothing fails",
        "KV load fails",
        "decode dies before the first byte",
        "decode dies after its preamble",
        "decode dies in mid-stream",
    ],
)
async def test_choices_tool_calls_reasoning_and_usage(harness: Harness, name: str) -> None:
    await harness.prefill()
    await harness.start(script(FAILURES[name].decode))
    await check_contents(name, Server(harness.url(""), harness.candidates))
