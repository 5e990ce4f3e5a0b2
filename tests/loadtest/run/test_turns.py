"""The record of a turn."""

import asyncio

from tandem_loadtest.calls import Call, Result
from tandem_loadtest.records import Record
from tandem_loadtest.run.turns import TurnSender

from .virtual import VirtualClock, single

CALL = Call("x", 4)


async def test_a_record_says_whether_the_request_was_sent_again() -> None:
    async def send(call: Call) -> Result:
        await asyncio.sleep(0)
        return Result(call, resent=1)

    records: list[Record] = []
    turns = TurnSender(
        send=send,
        write=lambda *_: CALL,
        clock=VirtualClock(),
        on_record=lambda record, _: records.append(record),
        model="m",
    )
    await turns.run(single(0, 0.0), CALL, 0.0)
    assert [record.resent for record in records] == [1]
