"""Whether spans are exported and to which URL: by a flag or by OpenTelemetry's own environment.

The EPP and the sidecar check this before they import OpenTelemetry, so that a process without
tracing does not load it.
"""

from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_TRACES_PATH: Final = "/v1/traces"


def is_wanted(flag: str, environ: Mapping[str, str]) -> bool:
    """Whether spans are exported; `flag` is a URL or empty."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    named = any(environ.get(name) for name in _ENDPOINTS)
    return bool(flag) or (named and "otlp" in [name.strip() for name in exporters])


def traces_url(flag: str) -> str:
    """The URL that spans are sent to: `flag`, with the path /v1/traces if it has none.

    Raises ValueError saying what is wrong.
    """
    parts = urlsplit(flag)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = None
    if not usable:
        raise ValueError(f"{flag!r} is not the URL of a collector: write http://HOST:4318")
    if parts.path in ("", "/"):
        return parts._replace(path=_TRACES_PATH).geturl()
    return flag
