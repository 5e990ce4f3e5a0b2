"""The figures of many pods, prepared for `choice`: what each request would combine is combined.

A decision reads every row, and a placement, an answer or a scrape changes one or two: so whatever
does not depend on the request is computed when a row is written.
"""

from collections.abc import Sequence
from typing import Final

from tandem_contract.fabric_classes import FabricClass

from .cost import PodFigures
from .fabrics import MAX_TRANSFER_SHARE

Computing = tuple[float, float, float, float, float, float]
"""What `prefill_terms` and `unified_terms` depend on:

    head_ends   0 without a prefill at the head: the past, of which no share is waited for
    late_share
    constant    queued, standing, load, the fixed part of a prefill
    per_token   with stall, congestion and eviction
    per_pair    likewise
    itl_harm
"""
Receiving = tuple[float, float, float, float, float, float]
"""What `decode_terms` and `is_transfer_too_long` depend on in one fabric class:

    constant    seconds that no request changes: latency, the decode step to join, standing
    per_token   of the transfer, as far as it is waited for
    itl_harm
    spare       as far as it is waited for, the seconds that the transfer may take longer than its
                share of D's own prefill, of which the next two are the coefficients
    share_per_token
    share_per_pair
"""
Queue = tuple[float, float, float]
"""What `wait_seconds` depends on: head_ends as above, late_share, queued."""
FirstToken = tuple[float, float, float, float, float]
"""What `first_token_seconds` depends on: head_ends and late_share as above; the seconds queued, of
a load and the fixed ones of a prefill; per_token; per_pair."""
_NO_QUEUE: Final = (0.0, 0.0, 0.0)

ITL_HARM: Final = 5
"""Index in `Computing`."""


class FigureTable:
    """The figures of pods, a row each. All lists have one entry per row."""

    def __init__(self, pods: Sequence[PodFigures] = ()) -> None:
        self.pods = list(pods)
        self.computing: list[Computing] = [(0.0,) * 6] * len(pods)
        self.receiving: tuple[list[Receiving], ...] = tuple(
            [(0.0,) * 6] * len(pods) for _ in FabricClass
        )
        """One list per `FabricClass`."""
        self.least_receiving: list[tuple[float, float, float]] = [(0.0,) * 3] * len(pods)
        """The least `constant` and `per_token` of all classes, and `itl_harm`."""
        self.first_tokens: list[FirstToken] = [(0.0,) * 5] * len(pods)
        self.free_tokens = [0.0] * len(pods)
        self.queues: list[Queue] = [_NO_QUEUE] * len(pods)
        self.has_windows = False
        """Whether a row has, or had, a model with sliding windows."""
        for row, pod in enumerate(pods):
            self.write(row, pod)

    def copy(self) -> "FigureTable":
        """A table with the same rows, to be changed on its own."""
        copied = FigureTable()
        copied.pods, copied.free_tokens = self.pods.copy(), self.free_tokens.copy()
        copied.computing, copied.first_tokens = self.computing.copy(), self.first_tokens.copy()
        copied.receiving = tuple(rows.copy() for rows in self.receiving)
        copied.queues = self.queues.copy()
        copied.has_windows = self.has_windows
        copied.least_receiving = self.least_receiving.copy()
        return copied

    def write(self, row: int, pod: PodFigures) -> None:
        """Replace the figures of one pod."""
        (
            head_ends, late_share, queued, fixed, per_token, per_pair, stall, itl_harm, free_tokens,
            standing, transfers, kv, step, exposed, congestion, load, _, eviction,
        ) = pod  # fmt: skip
        harmed, share = 1.0 + stall + congestion + eviction, MAX_TRANSFER_SHARE
        self.pods[row] = pod
        self.computing[row] = (
            head_ends if late_share else 0.0, late_share, queued + standing + load + fixed * harmed,
            per_token * harmed, per_pair * harmed, itl_harm,
        )  # fmt: skip
        self.first_tokens[row] = (
            head_ends if late_share else 0.0, late_share, queued + load + fixed,
            per_token, per_pair,
        )  # fmt: skip
        # Only a part of the transfer is waited for, but all of it must be within its share.
        share *= exposed
        constant, spare, size = step + standing, share * fixed, kv.short * exposed
        share_token, share_pair = share * per_token, share * per_pair
        # One by one: in compiled code a loop over them costs as much as all else here.
        near, around, far = self.receiving
        (latency, per_byte), (around_latency, around_byte), (far_latency, far_byte) = transfers
        near[row] = (
            latency + constant, per_byte * size, itl_harm,
            spare - latency * exposed, share_token, share_pair,
        )  # fmt: skip
        around[row] = (
            around_latency + constant, around_byte * size, itl_harm,
            spare - around_latency * exposed, share_token, share_pair,
        )  # fmt: skip
        far[row] = (
            far_latency + constant, far_byte * size, itl_harm,
            spare - far_latency * exposed, share_token, share_pair,
        )  # fmt: skip
        least = min(latency, around_latency, far_latency)
        least_per_byte = min(per_byte, around_byte, far_byte)
        self.least_receiving[row] = least + constant, least_per_byte * size, itl_harm
        self.free_tokens[row] = free_tokens
        if late_share or queued:
            self.queues[row] = (head_ends if late_share else 0.0, late_share, queued)
        else:
            self.queues[row] = _NO_QUEUE
        if kv.long is not None:
            self.has_windows = True
