"""What to send and when, as plain values: part of what the parent process passes to its workers.

Errors of this package:

    WorkloadError (a ValueError)      the settings do not fit together: the message names them
    ├── traces.TraceError             a trace cannot be replayed: correct the file
    ├── sharegpt.ConversationsError   a file of conversations cannot be sent: correct the file
    └── tokenizer.TokenizerError      no text of exact length: give another tokenizer file
"""

from typing import Annotated, Final

import msgspec

_Positive = Annotated[float, msgspec.Meta(gt=0)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
_Count = Annotated[int, msgspec.Meta(ge=1)]

PROCESSES: Final = ("poisson", "constant", "gamma", "ramp", "trace", "closed")
"""Values of `Arrivals.process`."""
STYLES: Final = ("token-ids", "tokenizer", "words")
"""Values of `Prompts.style`."""


class WorkloadError(ValueError):
    """The workload cannot be made from these settings; the message says which and what to do."""


class Arrivals(msgspec.Struct, frozen=True, kw_only=True):
    """When sessions start. `arrivals.start_times` has the formulas."""

    process: str
    """`poisson`, `constant`, `gamma`, `ramp`, `trace` or `closed`."""
    rate: _Positive | None = None
    """Sessions per second on average; of a ramp, at its start. Unused by `trace` and `closed`."""
    rate_end: _Positive | None = None
    """Of a ramp: sessions per second at its end, after the run's `duration`."""
    burstiness: _Positive = 1.0
    """Of gamma: shape of the distribution of gaps. Below 1 sessions come in bursts, 1 is Poisson,
    above 1 they come more regularly."""
    concurrency: _Count | None = None
    """Of closed loop: sessions at a time."""
    time_factor: _NotNegative = 1.0
    """Of a trace: its times are multiplied by this; `traces.pace` computes it from a rate."""


class Workload(msgspec.Struct, frozen=True, kw_only=True):
    """What sessions say. None: the preset's value."""

    preset: str
    """Name in `presets.PRESETS`, or `trace` or `sharegpt`, which need `file`."""
    file: str | None = None
    """Path of a Mooncake or Azure trace, or of ShareGPT-like conversations."""
    prompt_tokens: _Count | None = None
    """Mean tokens of a session's first prompt. Of a trace, the longest prompt, to which all are
    scaled; of ShareGPT-like files, the longest prompt that is sent."""
    output_tokens: _Count | None = None
    """Mean tokens of an answer. Of a trace, the longest answer, to which all are scaled; of
    ShareGPT-like files, the longest answer: longer ones are cut."""
    shared: _Share | None = None
    """Share of every session's first prompt that is a system prompt common to all, 0 to 1. Not of
    files, which have their own text or structure."""
    long: _Share | None = None
    """Of `bimodal`: share of the sessions that have a long prompt, 0 to 1."""
    turns: _Count | None = None
    """Requests per session; of ShareGPT-like files, at most. Not of traces."""
    think: _NotNegative | None = None
    """Mean seconds between the end of an answer and the next turn, in closed loop also between a
    session and the next; exponentially distributed. Not of traces."""
    models: dict[str, _Positive] = {}
    """Model name (a LoRA adapter) → weight in the mix; empty: the target's model. All turns of a
    session have the same model."""


class Prompts(msgspec.Struct, frozen=True, kw_only=True):
    """How segments become prompts of the right number of tokens."""

    style: str
    """`token-ids` (completions and generate), `tokenizer` (exact) or `words` (by calibration)."""
    tokenizer: str | None = None
    """Of style `tokenizer`: path of a `tokenizer.json`, or of the directory that has it."""
    tokens_per_word: _Positive = 1.3
    """Of style `words`: calibrated by the usage of the warm-up's answers. The default is common for
    English words and a vocabulary of 32,000 to 128,000 tokens."""
    tokens_per_message: _NotNegative = 0.0
    """Tokens that the server adds per message (its chat template), calibrated likewise. Prompts
    become shorter by as much, down to a word."""
