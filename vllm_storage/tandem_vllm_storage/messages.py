"""What the scheduler's side and the workers' side send each other, once per step.

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
    """One worker's KV cache. A worker knows it only after vLLM has registered the cache."""

    tensor_parallel: tuple[int, int]
    """Rank and size."""
    pipeline_parallel: tuple[int, int]
    """Rank and size."""
    layout: str
    """Shapes and strides of each layer, vLLM's minor version and attention backend."""
    dtype: str
    layers: int
    chunk_bytes: int

    @property
    def rank(self) -> int:
        """The worker's number."""
        return self.pipeline_parallel[0] * self.tensor_parallel[1] + self.tensor_parallel[0]

    @property
    def ranks(self) -> int:
        """Number of workers."""
        return self.pipeline_parallel[1] * self.tensor_parallel[1]


RankChunks = tuple[tuple[Chunk, ...], ...]
"""The same chunks with the keys of each rank, by rank."""


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """Load chunks into the blocks of a request that waits for them."""

    request_id: str
    chunks: RankChunks
    blocks: tuple[int, ...]
    """The blocks of all chunks, in order."""
    skipped_blocks: int
    """Leading blocks of the first chunk that are computed already. They are never written, because
    other requests may share them."""
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
    """By rank; sent in every step, because a worker needs its own before its first order."""
    prompt_tokens: int = 0
    """Prompt tokens that this step computes."""
    context: int = 0
    """Tokens before the longest part of a prompt that this step computes."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How a load ended on one worker."""

    request_id: str
    chunks: int
    """Leading chunks that were loaded."""
    is_whole: bool
    """Whether all chunks of the order were loaded. If not, vLLM computes the request."""
    reason: Reason | None
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How a save ended on one worker."""

    key: str
    """Key of the chunk on rank 0."""
    reason: Reason | None
    """Why the chunk is not stored; None: it is."""


@dataclass(slots=True)
class WorkerReport:
    """What happened on workers since their last report."""

    layouts: list[RankLayout] = field(default_factory=list)
    loads: list[LoadReport] = field(default_factory=list)
    saves: list[SaveReport] = field(default_factory=list)
    computed: list[tuple[int, int, float]] = field(default_factory=list)
    """Steps: prompt tokens, tokens before them, seconds to compute them."""

    def __bool__(self) -> bool:
        return bool(self.layouts or self.loads or self.saves or self.computed)

    def add(self, other: "WorkerReport") -> None:
        """Append another worker's report of the same step."""
        self.layouts += other.layouts
        self.loads += other.loads
        self.saves += other.saves
        self.computed += other.computed
