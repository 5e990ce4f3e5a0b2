"""Steps that others measured on GPUs, and rooflines of them.

Medians of splitwise-sim's table (github.com/Mutinifni/splitwise-sim, data/perf_model.csv; Patel and
others, *Splitwise*, ISCA 2024): Llama 2 70B in 16 bits under vLLM of 2023. And vLLM's own
performance benchmark of September 2024 (buildkite.com/vllm/performance-benchmark, builds 9515 and
9523): batches of 8 requests, 32 prompt tokens, 128 tokens each.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from typing import Final

from tandem_cli.plan.inputs import known_models
from tandem_planner.sizing.gpus import GPUS
from tandem_planner.sizing.model_shape import ModelShape, model_shape
from tandem_planner.sizing.roofline import ASSUMED, BEST, WORST, Efficiency, RooflineStep

_LLAMA_2_70B: Final = {**known_models()["llama-3.3-70b"], "vocab_size": 32000}
_TOKENS: Final = 128
"""Of each answer of a row."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: a batch's prefill, a token of its answers, or both together."""

    group: str
    model: ModelShape
    gpu: str
    tensor: int
    prompt: int
    """Tokens."""
    batch: int
    seconds: float
    prefills: int
    """Prefills of the batch within `seconds`: 1 or 0."""
    steps: int
    """Decode steps within `seconds`."""

    def predicted(self, efficiency: Efficiency = ASSUMED) -> float:
        """Seconds by the roofline."""
        step = RooflineStep(self.model, GPUS[self.gpu], self.tensor, efficiency=efficiency)
        n, b = self.prompt, self.batch
        prefill = step.seconds(0, 0, b * n, b * float(n) * n)
        return self.prefills * prefill + self.steps * step.seconds(b, b * (n + _TOKENS / 2))

    @property
    def is_within(self) -> bool:
        """Whether the measurement is between the bounds."""
        return self.predicted(BEST) <= self.seconds <= self.predicted(WORST)


def error(row: Row, efficiency: Efficiency = ASSUMED) -> float:
    """Predicted over measured, less 1."""
    return row.predicted(efficiency) / row.seconds - 1.0


def calibrated(rows: Sequence[Row]) -> tuple[Efficiency, list[Row]]:
    """What engines reach by five of `rows`, evenly chosen, and the rows that are left.

    Coordinate descent over the shares of FLOP/s and bandwidth and the overhead of a step."""
    chosen = [rows[round(i * (len(rows) - 1) / 4)] for i in range(5)]

    def loss(efficiency: Efficiency) -> float:
        return sum(abs(log(row.predicted(efficiency) / row.seconds)) for row in chosen)

    best = ASSUMED
    for _ in range(30):
        for field in ("matrices", "attention", "memory", "link", "overhead"):
            tried = [
                best._replace(**{field: getattr(best, field) * factor})
                for factor in (0.8, 0.95, 1.0, 1.05, 1.25)
            ]
            best = min(tried, key=loss)
    return best, [row for row in rows if row not in chosen]


_SPLITWISE: Final = (
    # GPU, tensor size, tokens of a prompt, prompts in the batch, seconds of prefill, of a token.
    ("a100", 2, 512, 1, 0.1969, 0.0549),
    ("a100", 2, 512, 4, 0.8454, 0.0605),
    ("a100", 2, 512, 16, 3.2388, 0.0655),
    ("a100", 2, 2048, 1, 0.6881, 0.0549),
    ("a100", 2, 8192, 1, 2.9902, 0.0573),
    ("a100", 4, 512, 1, 0.1270, 0.0450),
    ("a100", 4, 512, 4, 0.5714, 0.0451),
    ("a100", 4, 512, 16, 2.8926, 0.0485),
    ("a100", 4, 2048, 1, 0.4033, 0.0450),
    ("a100", 4, 8192, 1, 2.2785, 0.0461),
    ("a100", 8, 512, 1, 0.0943, 0.0449),
    ("a100", 8, 512, 4, 0.2923, 0.0458),
    ("a100", 8, 512, 16, 2.0844, 0.0504),
    ("a100", 8, 2048, 1, 0.2742, 0.0454),
    ("a100", 8, 8192, 1, 1.5498, 0.0465),
    ("h100", 2, 512, 1, 0.0838, 0.0370),
    ("h100", 2, 512, 4, 0.2998, 0.0400),
    ("h100", 2, 512, 16, 1.1920, 0.0420),
    ("h100", 2, 2048, 1, 0.3103, 0.0374),
    ("h100", 2, 8192, 1, 1.3398, 0.0378),
    ("h100", 4, 512, 1, 0.0596, 0.0297),
    ("h100", 4, 512, 4, 0.1953, 0.0299),
    ("h100", 4, 512, 16, 0.8743, 0.0328),
    ("h100", 4, 2048, 1, 0.2007, 0.0298),
    ("h100", 4, 8192, 1, 0.9536, 0.0297),
    ("h100", 8, 512, 1, 0.0534, 0.0298),
    ("h100", 8, 512, 4, 0.1326, 0.0318),
    ("h100", 8, 512, 16, 0.8119, 0.0342),
    ("h100", 8, 2048, 1, 0.1368, 0.0310),
    ("h100", 8, 8192, 1, 0.8449, 0.0314),
)
_VLLM: Final = (
    # Model, GPU, tensor size, seconds of prefill and 128 tokens.
    ("llama-3.3-70b", "h200", 4, 2.0776),
    ("llama-3.1-8b", "h200", 1, 0.8335),
    ("mixtral-8x7b", "h200", 2, 1.9166),
    ("llama-3.3-70b", "a100", 4, 3.9904),
    ("llama-3.1-8b", "a100", 1, 1.5793),
    ("mixtral-8x7b", "a100", 2, 3.6489),
)
PUBLISHED: Final = [
    *(
        Row(f"vLLM 2024, {_TOKENS} tokens", model_shape(known_models()[model]), gpu, tensor, 32, 8,
            seconds, 1, _TOKENS - 1)
        for model, gpu, tensor, seconds in _VLLM
    ),
    *(
        Row(f"vLLM 2023, {gpu.upper()}, a token", model_shape(_LLAMA_2_70B), gpu, tensor, prompt,
            batch, seconds, 0, 1)
        for gpu, tensor, prompt, batch, _, seconds in _SPLITWISE
    ),
    *(
        Row(f"vLLM 2023, {gpu.upper()}, prefill", model_shape(_LLAMA_2_70B), gpu, tensor, prompt,
            batch, seconds, 1, 0)
        for gpu, tensor, prompt, batch, seconds, _ in _SPLITWISE
    ),
]  # fmt: skip
