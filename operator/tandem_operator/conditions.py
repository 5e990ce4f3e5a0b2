"""Types and reasons of a pool's conditions; docs/run/pools.md is their runbook.

`Ready` has the reason of the condition that keeps the pool from being ready.
"""

from enum import StrEnum


class ConditionType(StrEnum):
    """The condition types. `planning.status_conditions` sets their order in a pool's status."""

    READY = "Ready"
    PODS_READY = "PodsReady"
    COMPATIBLE = "Compatible"
    PEER_READY = "PeerReady"
    ROUTER_READY = "RouterReady"
    PROGRESSING = "Progressing"
    RECONCILING = "Reconciling"
    STALLED = "Stalled"
    DRAINING = "Draining"
    SCALING_ACTIVE = "ScalingActive"
    TRANSPORT_VERIFIED = "TransportVerified"
    STORAGE_REACHABLE = "StorageReachable"
    UPDATE_AVAILABLE = "UpdateAvailable"


class Reason(StrEnum):
    """The reasons that the operator computes itself. Writes that the API server refuses bring
    reasons of their own (`Failure.reason`), and so does the router (`RouterState.reason`)."""

    # Ready, PodsReady
    ALL_READY = "AllReady"
    SCALED_TO_ZERO = "ScaledToZero"
    PODS_NOT_READY = "PodsNotReady"
    UNSCHEDULABLE = "Unschedulable"
    FITS_NO_NODE = "FitsNoNode"
    PODS_FAIL = "PodsFail"
    MODEL_PULLS = "ModelPulls"
    MODEL_PULL_FAILS = "ModelPullFails"
    # Compatible
    AGREES = "Agrees"
    ALONE = "Alone"
    MISMATCH = "Mismatch"
    INVALID_SPEC = "InvalidSpec"
    PEER_UNREADABLE = "PeerUnreadable"
    # PeerReady
    PAIRED = "Paired"
    PEER_MISSING = "PeerMissing"
    PEER_NOT_READY = "PeerNotReady"
    PEER_SCALED_TO_ZERO = "PeerScaledToZero"
    # RouterReady
    ROUTER_PENDING = "RouterPending"
    # Progressing
    COMPLETE = "Complete"
    STARTING = "Starting"
    ROLLING_OUT = "RollingOut"
    SCALING = "Scaling"
    WAITING_FOR_PEER = "WaitingForPeer"
    PAUSED = "Paused"
    HELD = "Held"
    PROGRESS_DEADLINE_EXCEEDED = "ProgressDeadlineExceeded"
    # Stalled
    NOT_STALLED = "NotStalled"
    # Draining
    NOTHING_DRAINS = "NothingDrains"
    PODS_DRAIN = "PodsDrain"
    DRAIN_STUCK = "DrainStuck"
    # ScalingActive
    NOT_CONFIGURED = "NotConfigured"
    AT_MINIMUM = "AtMinimum"
    # TransportVerified
    BYTES_MOVED = "BytesMoved"
    NOTHING_MOVED = "NothingMoved"
    # StorageReachable
    STORE_ANSWERS = "StoreAnswers"
    STORE_FAILS = "StoreFails"
    STORE_UNUSED = "StoreUnused"
    # UpdateAvailable
    UP_TO_DATE = "UpToDate"
    NEWER_TEMPLATE = "NewerTemplate"
