"""The `x-tandem-timing` header: durations and token counts known with the response headers.

    queue=0.0012;compute=0.2310;cached=512;computed=1024;transfer=0.0130;leg=0.2334;inflight=2

Tandem's torch engine reports its own leg; vLLM sends no such header. The sidecar writes the header
of every generation that a router sent, for the EPP: what both engines report (queue and compute of
the prefill, transfer of the decode), completed by what the sidecar itself measures, by the answer's
`usage`, and by what else was in flight. Unknown values are left out, and unknown names are ignored;
`-`: nothing is known.
A figure that no request can have, for instance a day, makes the whole header unusable: its sender
counts in other units, or is broken.
"""

from typing import Final

from msgspec import Struct
from msgspec.structs import astuple

from .timing_figures import read_figures, write_figures


class Timing(Struct, frozen=True):
    """Durations in seconds, tokens and bytes of one request; None: unknown."""

    queue: float | None = None
    """Seconds from admission to the start of the first prefill chunk, without `transfer`; and waits
    for KV in storage that could not be used."""
    compute: float | None = None
    """Seconds from the start of the first prefill chunk to the first token, without waits for
    KV."""
    cached: int | None = None
    """Prompt tokens found in the prefix cache. Unknown if the engine's `usage` does not say:
    vLLM counts them with `--enable-prompt-tokens-details` (old versions only if it is not 0)."""
    computed: int | None = None
    """Prompt tokens computed."""
    transfer: float | None = None
    """Seconds of the KV transfer, measured by the engine that it brought KV to. It may have
    computed meanwhile: these seconds are in `compute`, too."""
    bytes: int | None = None
    """KV bytes transferred."""
    leg: float | None = None
    """Seconds of the leg that computed the prompt, as the sidecar measured it: from sending the
    prefill request to its complete answer; without a prefill pod, from receiving the request to the
    engine's first output, which for an answer that is no stream is its end."""
    prompt: int | None = None
    """Prompt tokens by the answer's `usage`."""
    generated: int | None = None
    """Tokens generated within `leg` by the answer's `usage`; left out for a prefill leg and for a
    stream, whose leg ends with the first one."""
    inflight: int | None = None
    """Other prompts that this sidecar had under way at the same engine (the same data-parallel
    rank, where the plan names one) at some time during `leg`: from sending the request to the end
    of its leg. Written by the sidecar, read by the EPP, which knows so whether requests that it did
    not place took a part of the engine's time. Other sidecars, and other workers of this one, may
    have more under way there. See `overlaps`."""

    streamed: int | None = None
    """1 if both legs were sent at once, so that KV moved while the prompt was computed; else left
    out. `transfer` is then the time in which blocks arrived, most of it before the prefill's end.
    Written by the sidecar, read by the EPP."""
    waited: float | None = None
    """Seconds from the prefill's answer until the decode engine began to compute with the KV; for
    streamed hand-offs only. Written by the sidecar, if the decode engine reports `queue` and
    `transfer`; read by the EPP, which learns from it which share of transfers delays first
    tokens."""

    @property
    def prompt_tokens(self) -> int | None:
        """Prompt tokens: cached and computed ones, else those of `prompt`."""
        if self.cached is not None and self.computed is not None:
            return self.cached + self.computed
        return self.prompt

    def encode(self) -> str:
        """The header's value."""
        if self is UNKNOWN:
            return _NOTHING
        return write_figures(astuple(self)) or _NOTHING


_NOTHING: Final = "-"
UNKNOWN: Final = Timing()
"""The timing of an engine that does not send the header."""
OUT_OF_RANGE: Final = Timing()
"""The timing in a header with a figure beyond its limit."""


def parse_timing(value: str) -> Timing:
    """The timing in a header value; a malformed or negative figure counts as unknown.
    OUT_OF_RANGE, which holds nothing either, if a figure is beyond its limit."""
    if not value:
        return UNKNOWN
    figures = read_figures(value)
    if figures is None:
        return OUT_OF_RANGE
    # Names and types come from `timing_figures.TYPES`.
    return Timing(**figures) if figures else UNKNOWN  # type: ignore[arg-type]
