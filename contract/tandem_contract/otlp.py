"""Whether spans are exported, to which URL and by which protocol: by a flag or by OpenTelemetry's
own environment.

The EPP and the sidecar check this before they import OpenTelemetry, so that a process without
tracing does not load it.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final
from urllib.parse import urlsplit

_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS: Final = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_TRACES_PATH: Final = "/v1/traces"
_GRPC_PORT: Final = 4317
"""Collectors take OTLP by gRPC there (OpenTelemetry's specification), and by HTTP on 4318."""


class Protocol(StrEnum):
    """How spans are sent. The value is OpenTelemetry's name."""

    GRPC = "grpc"
    HTTP = "http/protobuf"


def is_wanted(flag: str, environ: Mapping[str, str]) -> bool:
    """Whether spans are exported; `flag` is a URL or empty."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = environ.get("OTEL_TRACES_EXPORTER", "otlp").split(",")
    named = any(environ.get(name) for name in _ENDPOINTS)
    return bool(flag) or (named and "otlp" in [name.strip() for name in exporters])


def protocol(flag: str, environ: Mapping[str, str]) -> Protocol:
    """The protocol that the environment names, else that of the collector's port: llm-d's charts
    name a collector at 4317 and no protocol. `flag` is a URL or empty."""
    if named := next(filter(None, (environ.get(name, "").strip() for name in _PROTOCOLS)), ""):
        return Protocol.GRPC if named == Protocol.GRPC else Protocol.HTTP
    url = flag or next(filter(None, (environ.get(name) for name in _ENDPOINTS)), "")
    return Protocol.GRPC if _port(url) == _GRPC_PORT else Protocol.HTTP


def traces_url(flag: str) -> str:
    """The URL that spans are sent to: `flag`, with the path /v1/traces if it has none. By gRPC the
    path means nothing.

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


def _port(url: str) -> int | None:
    try:
        return urlsplit(url if "//" in url else f"//{url}").port
    except ValueError:
        return None
