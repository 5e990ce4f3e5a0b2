"""Whether an engine uses its external store for KV, by its metrics, and whether the store works.

read_storage_use(page)       metrics page → the fact
check_storage_use(engine)    the fact → findings
storage_finding(location)    reads and writes an object in a store → its finding
"""

from collections.abc import Iterator
from typing import Final

from tandem_contract import metrics, vllm_storage
from tandem_contract.metrics_page import MetricsPage
from tandem_kvstore.errors import Reason
from tandem_kvstore.location import StoreLocation
from tandem_kvstore.probe import probe_store

from .facts import Engine, StorageUse
from .findings import Finding, Severity

_CHECK: Final = "storage"
_BREAKERS: Final = (metrics.ENGINE_STORAGE_BREAKER, vllm_storage.BREAKER_STATE)
_FAILURES: Final = (metrics.ENGINE_STORAGE_FAILURE, vllm_storage.FAILURE)
_NOT_STORED: Final = (
    metrics.ENGINE_STORAGE_NOT_STORED,
    # The constant is the name that vLLM's metrics page appends `_total` to.
    f"{vllm_storage.NOT_STORED_CHUNKS}_total",
)

_MOST_CHARACTERS: Final = 200
"""Most characters of a failure's message: an engine may run any program."""


def read_storage_use(page: MetricsPage) -> StorageUse | None:
    """None if the page says nothing of a store, as before an engine has used it."""
    breakers = [page.totals[name] for name in _BREAKERS if name in page.totals]
    if not breakers:
        return None
    by_message = [page.totals_by_label(name, "message") for name in _FAILURES]
    failures = [pair for messages in by_message for pair in messages.items()]
    newest = next((message for message, value in failures if value), "")[:_MOST_CHARACTERS]
    not_stored = [page.totals_by_label(name, "reason") for name in _NOT_STORED]
    full = sum(by_reason.get(Reason.FULL, 0.0) for by_reason in not_stored)
    # A closed breaker is 0; a page has one of each data-parallel rank.
    return StorageUse(not any(breakers), newest, full)


def check_storage_use(engine: Engine) -> Iterator[Finding]:
    """Whether the engine uses its store, and can write to it."""
    use = engine.storage
    if use is None:
        return
    if not use.is_used:
        reason = f": {use.failure}" if use.failure else ""
        detail = f"the engine computes instead of using its external store{reason}"
        fix = (
            "tandem doctor --storage URL tests the store and names the fix; once it answers, the "
            "engine uses it again by itself (if vLLM has reset its caches: once it is restarted)"
        )
        yield Finding(Severity.BROKEN, _CHECK, engine.pod, detail, fix)
        return
    if use.full_chunks:
        detail = (
            f"{use.full_chunks:.0f} chunks were not stored since the engine started, because the"
            " store was full"
        )
        fix = (
            "if the number still rises, give the store more space, or set"
            " transfer.storage.capacity below its size"
        )
        yield Finding(Severity.WARNING, _CHECK, engine.pod, detail, fix)
        return
    yield Finding(Severity.OK, _CHECK, engine.pod, "the engine uses its external store")


async def storage_finding(location: StoreLocation) -> Finding:
    """The result of the probe. Its texts have no key."""
    result = await probe_store(location)
    severity = Severity.BROKEN
    if result.works:
        severity = Severity.WARNING if result.is_limited else Severity.OK
    subject = f"{location.endpoint}/{location.namespace}"
    return Finding(severity, _CHECK, subject, result.detail, result.fix)
