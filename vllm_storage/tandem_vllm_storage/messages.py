"""What the scheduler's side and the workers' side say to each other, once per step.

    StepOrders    scheduler → every worker, inside vLLM's KVConnectorMetadata (pickled)
    WorkerReport  worker → scheduler, inside vLLM's KVConnectorWorkerMetadata (pickled)

A rank is the number of a worker: pipeline rank * tensor-parallel size + tensor rank.
"""

from dataclasses import dataclass, field

from tandem_kvstore.chunk_store import Chunk
from tandem_kvstore.errors import Reason
from tandem_kvstore.format.identity import KvIdentity


@dataclass(frozen=True, slots=True)
class RankLayout:
    """What one worker's KV cache looks like; it knows this only when vLLM has registered it."""

    tensor_parallel: tuple[int, int]
    """Rank and size."""
    pipeline_parallel: tuple[int, int]
    """Rank and size."""
    layout: str
    """Order of the dimensions of each layer, and who packs them."""
    dtype: str
    layers: int
    chunk_bytes: int

    @property
    def rank(self) -> int:
        """The worker's number."""
        return self.pipeline_parallel[0] * self.tensor_parallel[1] + self.tensor_parallel[0]

    @property
    def ranks(self) -> int:
        """How many workers there are."""
        return self.pipeline_parallel[1] * self.tensor_parallel[1]


RankChunks = tuple[tuple[Chunk, ...], ...]
"""The same chunks with each rank's keys; the index is the rank."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load chunks into the blocks of a request that waits for them."""

    request_id: str
    chunks: RankChunks
    blocks: tuple[int, ...]
    """The blocks of all chunks, in their order."""
    skipped_blocks: int
    """Leading blocks of the first chunk that the request shares with others: never written."""
    context: int
    """Tokens before the first chunk."""
    deadline: float
    """Seconds from the arrival of the order."""


@dataclass(frozen=True, slots=True)
class SaveOrder:
    """Copy one chunk whose KV is complete after this step, and write it."""

    chunk: tuple[Chunk, ...]
    """The chunk with each rank's key."""
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All orders of one step."""

    loads: tuple[LoadOrder, ...] = ()
    saves: tuple[SaveOrder, ...] = ()
    identities: tuple[KvIdentity, ...] = ()
    """By rank; sent until all workers have stopped to report their layouts."""
    prompt_tokens: int = 0
    """Prompt tokens that this step computes."""
    context: int = 0
    """Tokens before the longest of this step's prompt chunks."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How a load ended on one worker."""

    request_id: str
    chunks: int
    """Leading chunks that were loaded."""
    is_whole: bool
    """Whether all that were ordered were: otherwise vLLM computes the request."""
    reason: Reason | None
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save ended on one worker."""

    key: str
    """Of rank 0."""
    reason: Reason | None
    """None: it is in the store."""


@dataclass(slots=True)
class WorkerReport:
    """What happened on workers since their last report."""

    layouts: list[RankLayout] = field(default_factory=list)
    loads: list[LoadReport] = field(default_factory=list)
    saves: list[SaveReport] = field(default_factory=list)
    computed: list[tuple[int, int, float]] = field(default_factory=list)
    """Prompt tokens of a step, tokens before them, seconds that computing them took."""

    def __bool__(self) -> bool:
        return bool(self.layouts or self.loads or self.saves or self.computed)

    def add(self, other: "WorkerReport") -> None:
        """Append another worker's report of the same step."""
        self.layouts += other.layouts
        self.loads += other.loads
        self.saves += other.saves
        self.computed += other.computed
