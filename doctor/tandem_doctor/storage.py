"""The check of an external store for KV: reads and writes an object there."""

from tandem_kvstore.location import StoreLocation
from tandem_kvstore.probe import probe_store

from .findings import Finding, Severity

_CHECK = "storage"


async def storage_finding(location: StoreLocation) -> Finding:
    """The result of the probe. Its texts have no key."""
    result = await probe_store(location)
    severity = Severity.BROKEN
    if result.works:
        severity = Severity.WARNING if result.is_limited else Severity.OK
    subject = f"{location.endpoint}/{location.namespace}"
    return Finding(severity, _CHECK, subject, result.detail, result.fix)
