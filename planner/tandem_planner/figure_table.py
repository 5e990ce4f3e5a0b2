"""The figures of many pods, prepared for `choice`: what each request would combine is combined.

A decision reads every row, and a placement, an answer or a scrape changes one or two: so whatever
does not depend on the request is computed when a row is written.
"""

from collections.abc import Sequence
from typing import NamedTuple

from .cost import HANDOFF_SECONDS, MAX_TRANSFER_SHARE, PodFigures


class ComputingFigures(NamedTuple):
    """What `prefill_terms` and `unified_terms` depend on."""

    head_ends: float
    """0 without a prefill at the head of the queue: the past, of which no share is waited for."""
    late_share: float
    constant: float
    """Seconds that the request does not change: `queued`, `standing`, a prefill's fixed part."""
    per_token: float
    """With the stall, like the next."""
    per_pair: float
    itl_harm: float


class ReceivingFigures(NamedTuple):
    """What `decode_terms` and `is_transfer_too_long` depend on."""

    constant: float
    """Seconds that the request does not change: latency, hand-off, `standing`."""
    per_token: float
    """Seconds of transfer."""
    itl_harm: float
    spare: float
    """Seconds that the transfer may take longer than this share of D's own prefill of the same
    tokens, which has these two coefficients."""
    share_per_token: float
    share_per_pair: float


class FigureTable:
    """The figures of pods, a row each. All lists have one entry per row."""

    def __init__(self, pods: Sequence[PodFigures] = ()) -> None:
        self.pods = list(pods)
        self.computing = [_computing(pod) for pod in pods]
        self.receiving = [_receiving(pod) for pod in pods]
        self.free_tokens = [pod.free_tokens for pod in pods]
        self.has_windows = any(pod.kv.long is not None for pod in pods)
        """Whether a row has, or had, a model with sliding windows."""

    def copy(self) -> "FigureTable":
        """A table with the same rows, to be changed on its own."""
        copied = FigureTable()
        copied.pods, copied.free_tokens = self.pods.copy(), self.free_tokens.copy()
        copied.computing, copied.receiving = self.computing.copy(), self.receiving.copy()
        copied.has_windows = self.has_windows
        return copied

    def write(self, row: int, pod: PodFigures) -> None:
        """Replace the figures of one pod."""
        self.pods[row] = pod
        self.computing[row] = _computing(pod)
        self.receiving[row] = _receiving(pod)
        self.free_tokens[row] = pod.free_tokens
        self.has_windows = self.has_windows or pod.kv.long is not None


def _computing(pod: PodFigures) -> ComputingFigures:
    harmed = 1.0 + pod.stall
    return ComputingFigures(
        pod.head_ends if pod.late_share else 0.0,
        pod.late_share,
        pod.queued + pod.standing + pod.fixed * harmed,
        pod.per_token * harmed,
        pod.per_pair * harmed,
        pod.itl_harm,
    )


def _receiving(pod: PodFigures) -> ReceivingFigures:
    latency, share = pod.transfer_latency, MAX_TRANSFER_SHARE
    return ReceivingFigures(
        latency + HANDOFF_SECONDS + pod.standing,
        pod.transfer_per_byte * pod.kv.short,
        pod.itl_harm,
        share * pod.fixed - latency,
        share * pod.per_token,
        share * pod.per_pair,
    )
