"""Events whose form is known are read as all others: those of a stream with CRLF have none."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest

from tandem_contract.request_kinds import RequestKind
from tandem_sidecar.resume.errors import StreamBroken
from tandem_sidecar.resume.ledger import Ledger
from tandem_sidecar.resume.plain_events import Form
from tandem_sidecar.resume.seam import Seam
from tandem_sidecar.resume.whole_tokens import WholeTokens

from .engine import PROMPT, Engine
from .events import DONE, chat_event, event, role_event, usage_event

TEXT = (
    'say "灯台" \\ or 😀🚀, [7], '
    '"},"logprobs":null,"finish_reason":null,"token_ids":[5]}]}\n\nand more'
)
ENGINES = (Engine(TEXT), Engine(TEXT, sizes=(3, 1, 4, 2)), Engine(TEXT, joined=(1, 3, 2, 1, 1)))
CHAT = [
    role_event([1, 2, 3]),
    *(chat_event(text, [number]) for number, text in enumerate("abc", 7)),
    chat_event("de", [7, 8]),
    chat_event("f", [9, 70]),
    chat_event("", [71]),
    chat_event("g", [72]),
    chat_event("h", [7], logprobs={"content": [{"token": "h"}]}),
    chat_event("i", [], finish=None),
    chat_event("j", [8], id="cmpl-other"),
    chat_event("k", [8]),
    chat_event("l", [9], finish="stop"),
    usage_event(3, 12, id="cmpl-first"),
    DONE,
]
PARSED = [*CHAT[:4], chat_event({"content": "x", "reasoning": "y"}, [9]), *CHAT[5:]]
BROKEN = [*CHAT[:4], b'data: {"error":{"message":"died"}}\n\n', *CHAT[4:]]


@pytest.mark.parametrize("keeps_ids", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", [RequestKind.COMPLETIONS, RequestKind.CHAT])
def test_a_stream_in_pieces(kind: RequestKind, engine: Engine, keeps_ids: bool) -> None:
    asks: dict[str, Any] = {"prompt": [*PROMPT]}
    if kind is RequestKind.CHAT:
        asks = {"messages": []}
    stream = engine.answer({"max_tokens": len(engine.tokens), **asks})
    for size in (1, 7, 150, 331, 1_000, 100_000):
        compare(kind, stream, size, keeps_ids=keeps_ids)


@pytest.mark.parametrize("stream", [CHAT, PARSED, BROKEN], ids=["odd", "parsed", "broken"])
def test_odd_events_between_plain_ones(stream: Sequence[bytes]) -> None:
    for size, keeps_ids in product((1, 50, 200, 500, 100_000), (False, True)):
        compare(RequestKind.CHAT, stream, size, keeps_ids=keeps_ids)


def test_most_events_have_a_known_form() -> None:
    form = Form()
    sent = event("a", [7])
    form.learn(sent, sent.index(b"a", sent.index(b'"text"')), sent.index(b"7"), sent.index(b"]"))
    for _ in range(9):
        # Its end is not known.
        form.learn(quoted := event('"', [7]), quoted.index(b'\\"'), quoted.index(b"[7") + 1, -8)
    other = event("other text", [1234])
    token, begin, end = form.token_of(b"before" + other, len(b"before"))
    assert token == 1234
    assert (b"before" + other)[begin:].startswith(b"1234]")
    assert end == len(b"before" + other)
    for unlike in (
        event("", [7]),
        event('"', [7]),
        event("b", []),
        event("b", [7, 8]),
        event("b", [1 << 32]),
        event("b", None),
        event("b", [7], finish="stop"),
        event("b", [7], id="cmpl-2"),
        event("b", [7], [1]),
        event("b", [7])[:-1],
    ):
        assert form.token_of(unlike, 0) == (-1, 0, 0)


def compare(kind: RequestKind, stream: Sequence[bytes], size: int, *, keeps_ids: bool) -> None:
    """What is sent, and noted, of a stream in pieces of `size` bytes is the same with CRLF."""
    data = b"".join(stream)
    assert read(kind, data, size, keeps_ids=keeps_ids) == read(
        kind, data.replace(b"\n", b"\r\n"), size, keeps_ids=keeps_ids
    )


def read(kind: RequestKind, data: bytes, size: int, *, keeps_ids: bool) -> list[Any]:
    """What the client gets of `data`, and what is known of it."""
    tokens = WholeTokens()
    ledger, out, broken = Ledger(kind, Seam(), tokens, keeps_ids=keeps_ids), b"", ""
    for start in range(0, len(data), size):
        try:
            out += ledger.take(data[start : start + size])
        except StreamBroken as err:
            out, broken = out + err.before, str(err)
            break
    known = [token for token in range(300) if token in tokens]
    ids = list(ledger.prompt_ids), list(ledger.ids), ledger.delivered, ledger.seam.start
    return [out, broken, known, *ids, ledger.is_finished, ledger.is_done, ledger.obstacle]
