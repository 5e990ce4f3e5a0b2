"""What an engine's metrics page says of its load and of its work since it started."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gauges:
    """Load as the backend's own metrics report it."""

    running: float = 0.0
    """Requests that the engine is computing."""
    waiting: float = 0.0
    """Requests in the engine's queue, those that wait for remote KV included."""
    kv_usage: float = 0.0
    """Share of the KV cache in use, 0 to 1."""
    deferred: float = 0.0
    """Requests among `waiting` that wait for remote KV and not for the engine."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """What the engine counted since it started; None where the page does not report it.

    vLLM observes `prefill_seconds`, `prefill_tokens`, `decode_seconds` and `queue_seconds` when a
    request ends, and counts prompt tokens when a prompt is complete. So only the former four
    describe the same requests between two scrapes, except on a prefill pod, whose requests end with
    their prompt.
    """

    prefill_seconds: float | None = None
    """Seconds of prefill, over all requests that ended."""
    prefills: float | None = None
    """Requests in `prefill_seconds`."""
    prefill_tokens: float | None = None
    """Prompt tokens computed for the requests in `prefill_seconds`."""
    computed_tokens: float | None = None
    """Prompt tokens computed: neither cached nor transferred."""
    prompt_tokens: float | None = None
    """Tokens of all prompts that got their first token."""
    external_tokens: float | None = None
    """Those of them whose KV came from elsewhere: another engine, or a cache outside the engine."""
    decode_seconds: float | None = None
    """Seconds from the first token to the last one, over all requests that ended."""
    queue_seconds: float | None = None
    """Seconds in the engine's queue, over all requests that ended."""
    queued: float | None = None
    """Requests in `queue_seconds`."""
    itl_seconds: float | None = None
    """Seconds between two tokens of one request, over all such intervals."""
    itls: float | None = None
    """Intervals in `itl_seconds`."""
    transfer_bytes: float | None = None
    """Bytes of KV that this engine read from other engines (NIXL)."""
    transfer_seconds: float | None = None
    """Seconds that these transfers took; concurrent transfers each count in full."""
    transfers: float | None = None
    """Transfers in `transfer_seconds`."""
    loaded_bytes: float | None = None
    """Bytes of KV that this engine loaded from external storage."""
    loaded_tokens: float | None = None
    """Tokens of these bytes."""
    load_seconds: float | None = None
    """Seconds that these loads took; concurrent loads each count in full."""
    loads: float | None = None
    """Loads in `load_seconds`."""
    generated_tokens: float | None = None
    """Tokens generated."""
    preemptions: float | None = None
    """Requests that lost their KV because blocks ran out, and were computed again."""


def difference(before: float | None, after: float | None) -> float:
    """By how much a counter moved; 0 where one is not reported, or where it went back."""
    return max(0.0, after - before) if before is not None and after is not None else 0.0
