"""Both sides of the connector around torch tensors instead of vLLM's cache, and a real store."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from tandem_kvstore.errors import Reason
from tandem_kvstore.format.identity import KvIdentity, Prompt
from tandem_kvstore.guard.breaker import BreakerState
from tandem_vllm_storage.block_copies import BlockCopies
from tandem_vllm_storage.messages import RankLayout, StepOrders, WorkerReport
from tandem_vllm_storage.scheduler import SchedulerSide
from tandem_vllm_storage.settings import StorageSettings
from tandem_vllm_storage.stored_chunks import BlocksStored
from tandem_vllm_storage.worker import WorkerSide

BLOCK, CHUNK, BLOCKS = 4, 8, 32


@dataclass
class FakeRequest:
    """What the scheduler's side reads of vLLM's request."""

    request_id: str
    tokens: list[int]
    num_prompt_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    use_structured_output: bool = False
    max_tokens: int = 1
    sampling_params: SimpleNamespace = field(default_factory=SimpleNamespace)

    def __post_init__(self) -> None:
        self.num_prompt_tokens = self.num_prompt_tokens or len(self.tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)


@dataclass
class Counted:
    """Figures of the connector."""

    loaded: int = 0
    stored: int = 0
    not_loaded: list[Reason] = field(default_factory=list)
    not_stored: list[Reason] = field(default_factory=list)
    transfers: int = 0
    failed_transfers: int = 0

    def add_loaded(self, tokens: int, size: int, seconds: float) -> None:
        self.loaded += tokens

    def add_stored(self, tokens: int) -> None:
        self.stored += tokens

    def add_not_loaded(self, chunks: int, reason: Reason) -> None:
        self.not_loaded.append(reason)

    def add_not_stored(self, reason: Reason) -> None:
        self.not_stored.append(reason)

    def add_transfer(self, seconds: float) -> None:
        self.transfers += 1

    def add_failed_transfer(self) -> None:
        self.failed_transfers += 1

    def set_breaker(self, state: BreakerState) -> None: ...
    def set_failure(self, words: str) -> None: ...


class Requests:
    """Reads FakeRequests; a block's hash is the number of its last token."""

    def prompt(self, request: FakeRequest) -> Prompt:
        return Prompt(request.tokens)

    def blocks(self, request: FakeRequest, start: int, end: int) -> BlocksStored:
        hashes = range(start + BLOCK, end + 1, BLOCK)
        return BlocksStored(list(hashes), start or None, request.tokens[start:end], BLOCK)


class Engine:
    """One engine of `ranks` workers; `step` is what vLLM does with the connector in a step."""

    def __init__(
        self,
        store: Path,
        ranks: int = 1,
        weights: str = "w",
        bounds_file: Path | None = None,
        endpoint: str = "",
        max_tokens: int = 1 << 20,
    ) -> None:
        """`endpoint`: of another store than that in the directory `store`. `max_tokens`: the
        longest sequence of the model."""
        settings = StorageSettings(
            endpoint=endpoint or f"file://{store}",
            chunk_tokens=CHUNK,
            bounds_file=str(bounds_file) if bounds_file else None,
        )
        self.caches = [[torch.zeros(BLOCKS, 2, BLOCK, 3) for _ in range(2)] for _ in range(ranks)]
        self.counted = Counted()
        self.workers = [_worker(settings, cache, r, ranks) for r, cache in enumerate(self.caches)]
        self.scheduler = SchedulerSide(
            settings,
            BLOCK,
            lambda layouts: tuple(_identity(layout, weights) for layout in layouts),
            Requests(),
            self.counted,
            max_model_len=max_tokens,
        )
        # A step with nothing in it: the workers report their layouts, then get their identities.
        self.step()
        self.step()
        # Computing takes seconds here, so that every load is worth it.
        for _ in range(20):
            self.scheduler.add_report(WorkerReport(computed=[(100, 0, 100.0)]))

    def step(self, *scheduled: Any) -> set[str]:
        """Run one step; returns the requests whose load has failed."""
        orders: StepOrders = self.scheduler.orders(scheduled)
        report, failed = WorkerReport(), set()
        for worker in self.workers:
            worker.begin_step()
            worker.load(orders)
            worker.save(orders)
            failed |= {r.request_id for r in worker.take_ended_loads() if not r.is_whole}
            report.add(worker.take_report() or WorkerReport())
        # These steps compute nothing: learned from, they would shorten the deadlines of loads to
        # milliseconds, which a busy machine does not keep.
        report.computed.clear()
        self.scheduler.add_report(report)
        return failed

    def ask(self, request: FakeRequest, computed: int = 0) -> int:
        """vLLM's question, repeated until it is answered."""
        self.scheduler.begin(request)
        while (tokens := self.scheduler.matched_tokens(request, computed)) is None:
            pass
        return tokens

    def load(self, request: FakeRequest, blocks: list[int], computed: int = 0) -> set[str]:
        """Ask, allocate and step until the load has ended; returns the requests that failed."""
        external = self.ask(request, computed)
        self.scheduler.start_load(request, blocks, external)
        before = self.counted.loaded, len(self.counted.not_loaded)
        failed = self.step()
        while (self.counted.loaded, len(self.counted.not_loaded)) == before:
            failed |= self.step()
        return failed

    def compute(self, request: FakeRequest, blocks: list[int], value: float) -> None:
        """Compute a prompt: its blocks hold `value`; wait until its chunks were written."""
        for cache in self.caches:
            for layer in cache:
                layer[blocks] = value
        self.ask(request)
        self.step((request, blocks, 0, request.num_tokens))
        while self.scheduler.is_writing:
            self.step()

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.scheduler.close()


def _worker(
    settings: StorageSettings, cache: list[torch.Tensor], rank: int, ranks: int
) -> WorkerSide:
    copies = BlockCopies({f"l{i}": x for i, x in enumerate(cache)}, BLOCKS, CHUNK // BLOCK)
    layout = RankLayout(
        (rank, ranks), (0, 1), copies.layout, copies.dtype, copies.layers, copies.chunk_bytes
    )
    return WorkerSide(settings, layout, copies, BLOCK)


def _identity(layout: RankLayout, weights: str) -> KvIdentity:
    return KvIdentity(
        weights=weights, dtype=layout.dtype, layers=layout.layers, kv_heads=1, head_dim=3,
        block_size=BLOCK, chunk_tokens=CHUNK, layout=layout.layout,
        tensor_parallel=layout.tensor_parallel,
    )  # fmt: skip
