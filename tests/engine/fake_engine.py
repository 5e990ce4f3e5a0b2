"""A scripted engine and a byte-level tokenizer, for tests of the HTTP side without torch."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tandem_contract.timing import Timing
from tandem_contract.transfer_params import TransferParams
from tandem_engine.types import Delta, Request

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
TIMING = Timing(queue=0.5, compute=0.25, cached=3, computed=4)


def write_tokenizer(directory: Path, *, template: str | None = TEMPLATE) -> None:
    """One token per byte, ids 0 to 255, then `<s>` 256 and `</s>` 257."""
    # The alphabet's characters in the order of the bytes they stand for.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    names = {byte: chr(byte) for byte in printable}
    names |= {byte: chr(256 + i) for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE({names[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "chat_template": template}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@dataclass(frozen=True)
class FakeStats:
    running: int = 1
    waiting: int = 5
    waiting_for_kv: int = 2
    kv_usage: float = 0.25
    held_requests: int = 3


class FakeGeneration:
    def __init__(self) -> None:
        self.deltas: asyncio.Queue[Delta] = asyncio.Queue()
        self.ended = False

    def say(self, *deltas: Delta) -> None:
        for delta in deltas:
            self.deltas.put_nowait(delta)

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self

    async def __anext__(self) -> Delta:
        if self.ended:
            raise StopAsyncIteration
        delta = await self.deltas.get()
        self.ended = delta.finish_reason is not None
        return delta


Script = Callable[[Request], Iterable[Delta]]


class FakeEngine:
    """Answers each request with what `script` says; without one, a test says it by hand."""

    def __init__(self, script: Script | None = None) -> None:
        self.script = script
        self.healthy = True
        self.requests: list[Request] = []
        self.generations: list[FakeGeneration] = []
        self.submitted = asyncio.Event()
        self.aborted: list[str] = []
        self.abort_seen = asyncio.Event()
        self.released: list[TransferParams] = []
        self.release_seen = asyncio.Event()
        self.released_holds: asyncio.Queue[str] = asyncio.Queue()
        self.nothing_held = asyncio.Event()
        self.nothing_held.set()

    def submit(self, request: Request) -> FakeGeneration:
        generation = FakeGeneration()
        generation.say(*(self.script(request) if self.script else ()))
        self.requests.append(request)
        self.generations.append(generation)
        self.submitted.set()
        return generation

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.abort_seen.set()
        index = [request.request_id for request in self.requests].index(request_id)
        self.generations[index].say(Delta(finish_reason="abort"))

    def release_hold(self, request_id: str) -> None:
        self.released_holds.put_nowait(request_id)

    async def wait_until_unheld(self) -> None:
        await self.nothing_held.wait()

    async def release_remote_hold(self, params: TransferParams) -> None:
        self.released.append(params)
        self.release_seen.set()

    def stats(self) -> FakeStats:
        return FakeStats()


def answer_with(text: str, *, finish: str = "length", **last: object) -> Script:
    """One token per byte of `text`, then the end."""

    def script(_: Request) -> list[Delta]:
        ids = text.encode()
        deltas = [Delta(token_ids=(i,)) for i in ids]
        deltas[0] = Delta(token_ids=(ids[0],), timing=TIMING)
        return [*deltas, Delta(finish_reason=finish, **last)]

    return script
