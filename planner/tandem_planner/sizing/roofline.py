"""Seconds of an engine's step on GPUs that were not measured: rooflines of the step's parts.

    step        = overhead + per_request × decodes + matrices + attention + exchange
    matrices    = max(2 × active parameters × tokens ÷ (TP × FLOP/s × `matrices`),
                      bytes of weights read ÷ (TP × memory's bytes/s × `memory`))
    attention   = KV bytes of the decodes, per GPU ÷ (memory's bytes/s × `memory`)
                + FLOPs of the prompts' pairs ÷ (TP × FLOP/s × `attention`)
    exchange    = 2 all-reduces per layer: latency + 2 (TP - 1) ÷ TP × bytes ÷ (link × `link`)

The first is the roofline of Williams, Waterman, Patterson (CACM 52, 2009): a matrix is either
waited for or computed with. The ring all-reduce is that of Patarasuk and Yuan (JPDC 69, 2009). A
prompt token looks at the tokens before it: n² + 2 n cached are twice the number of pairs, each of
which takes 2 FLOPs per element of the query and of the value. Layers with a window look at no more
than it.

Data sheets give peaks; which part of them an engine reaches is assumed (`ASSUMED`), within bounds
(`BEST`, `WORST`), until it is measured.
"""

from typing import Final, NamedTuple

from tandem_planner.kv_size import KvSize, rank_kv_size
from tandem_planner.layer_kinds import layer_counts
from tandem_planner.step_cost import LinearStep, pairs

from .gpus import Gpu
from .model_shape import ModelShape


class Efficiency(NamedTuple):
    """Which part of the peaks an engine reaches, and what each step takes beside them."""

    matrices: float
    """Share of the FLOP/s that multiplications of weights reach."""
    attention: float
    """Share of the FLOP/s that the attention of prompts reaches."""
    memory: float
    """Share of the memory's bandwidth."""
    link: float
    """Share of the bandwidth within a node."""
    overhead: float
    """Seconds of a step, whatever is in it: scheduling, launches."""
    per_request: float
    """Seconds of a step per decode: preparing, sampling, sending its token."""


ASSUMED: Final = Efficiency(0.6, 0.4, 0.75, 0.7, 3e-3, 1.5e-5)
BEST: Final = Efficiency(0.75, 0.6, 0.9, 0.9, 1e-3, 5e-6)
WORST: Final = Efficiency(0.42, 0.25, 0.55, 0.45, 8e-3, 5e-5)
"""`ASSUMED` lies between these. Matrices and memory: engines are reported with 40 to 75 % of the
peaks. Attention: FlashAttention reaches 35 % of an H100 in its second version and 75 % in its third
(arXiv:2407.08608), on long prompts alone. Overhead: a step of vLLM with CUDA graphs to one whose
scheduler is not ahead of the GPU."""
_ELEMENT: Final = 2.0
"""Bytes per element of what is exchanged."""
_ALL_REDUCE_LATENCY: Final = 1e-5
"""Seconds of an all-reduce of no bytes within a node."""


class RooflineCoefficients(NamedTuple):
    """What `RooflineStep.seconds` computes with, in seconds."""

    overhead: float
    per_request: float
    per_row: float
    """Multiplications of weights, for each token of a step."""
    last: float
    """The last layer, for each token of an answer."""
    reading: float
    """Reading the weights that each step reads."""
    experts: float
    """Reading all experts; 0: there are none."""
    missed: float
    """Share of the experts that a token does not choose."""
    kv: KvSize
    """Reading the KV of a decode."""
    per_pair: float
    per_near_pair: float
    """In layers with a window."""
    window: float
    """Pairs of a token in those, at most; 0: there are none."""
    exchange: float
    exchange_row: float


class RooflineStep:
    """The steps of one engine. A `StepCost`."""

    def __init__(
        self,
        model: ModelShape,
        gpu: Gpu,
        tensor: int,
        *,
        cache_dtype: str = "auto",
        efficiency: Efficiency = ASSUMED,
    ) -> None:
        """`tensor`: GPUs that share each layer (tensor parallelism)."""
        self.model, self.gpu, self.tensor, self.efficiency = model, gpu, tensor, efficiency
        counts, share = layer_counts(model.kv), efficiency
        peak = gpu.fp8 if model.is_fp8 and gpu.fp8 else gpu.bf16
        self._per_row = 2.0 * model.active / (tensor * peak * share.matrices)
        last = 2.0 * model.vocabulary * model.hidden
        # The last layer is computed for tokens of answers only, of which a prompt has one.
        self._last = last / (tensor * gpu.bf16 * share.matrices)
        memory = tensor * gpu.bandwidth * share.memory
        self._reading = model.read_bytes(0.0) / memory
        self._experts = model.experts * model.weight_bytes / memory
        chosen = model.experts_per_token / model.expert_count if model.expert_count else 0.0
        self._missed = 1.0 - chosen
        size = rank_kv_size(model.kv, tensor, cache_dtype)
        memory = gpu.bandwidth * share.memory
        long = size.short if size.long is None else size.long
        self._kv = KvSize(size.short / memory, size.windows / memory, long / memory)
        elements = model.heads * (model.query_size + model.kv.value_size)
        attention = elements / (tensor * gpu.bf16 * share.attention)
        self._per_pair, self._per_near_pair = counts.full * attention, counts.window * attention
        self._window = 2.0 * (model.kv.window or 0)
        self._exchange, self._exchange_row = 0.0, 0.0
        if tensor > 1:
            row = 2.0 * (tensor - 1) / tensor * model.hidden * _ELEMENT
            per_row = row / (gpu.within_node * share.link)
            self._exchange = 2.0 * model.kv.layers * _ALL_REDUCE_LATENCY
            self._exchange_row = 2.0 * model.kv.layers * per_row

    def seconds(
        self, decodes: float, context: float, tokens: float = 0.0, pairs: float = 0.0
    ) -> float:
        """Seconds of one step."""
        rows, share = decodes + tokens, self.efficiency
        reading = self._reading
        if self._experts:
            reading += self._experts * (1.0 - self._missed ** max(1.0, rows))
        computing = self._per_row * rows + self._last * min(rows, decodes + 1.0)
        seconds = share.overhead + share.per_request * decodes + max(computing, reading)
        seconds += self._exchange + self._exchange_row * rows
        if decodes > 0:
            seconds += decodes * self._kv.bytes(context / decodes)
        if tokens > 0:
            near = min(pairs, tokens * self._window) if self._window else pairs
            seconds += self._per_pair * pairs + self._per_near_pair * near
        return seconds

    def coefficients(self) -> RooflineCoefficients:
        """For those who compute the same in another language."""
        return RooflineCoefficients(
            overhead=self.efficiency.overhead,
            per_request=self.efficiency.per_request,
            per_row=self._per_row,
            last=self._last,
            reading=self._reading,
            experts=self._experts,
            missed=self._missed,
            kv=self._kv,
            per_pair=self._per_pair,
            per_near_pair=self._per_near_pair,
            window=self._window,
            exchange=self._exchange,
            exchange_row=self._exchange_row,
        )


def linear(step: RooflineStep, *, decodes: int, context: float, chunk: int) -> LinearStep:
    """The step's coefficients around `decodes` answers of `context` KV tokens, and chunks of
    `chunk` prompt tokens: what an engine like this would be measured with."""
    few, many, far = max(1, decodes // 4), max(2, decodes), 2.0 * context
    at = step.seconds(many, many * context)
    per_context = (step.seconds(many, many * far) - at) / (many * (far - context))
    per_decode = (at - step.seconds(few, few * context)) / (many - few) - per_context * context
    fixed = at - many * (per_decode + per_context * context)
    alone = step.seconds(0, 0, chunk, pairs(0, chunk))
    per_pair = (step.seconds(0, 0, chunk, 2.0 * pairs(0, chunk)) - alone) / pairs(0, chunk)
    per_token = (alone - fixed) / chunk - per_pair * chunk
    return LinearStep(fixed, per_decode, per_context, per_token, per_pair)
