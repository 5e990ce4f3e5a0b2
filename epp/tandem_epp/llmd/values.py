"""The settings that llm-d's flags stand for. Pure.

With `--pool-name` or `--endpoint-selector` llm-d's defaults hold: TLS on ext_proc's port, metrics
that need a token, and 30 s in which a leaving EPP still answers.

Errors: ValueError, which names the flag.
"""

import re
import ssl
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tandem_contract import go_tls
from tandem_contract.commandline import HostPort

from ..backends.inference_pool import GROUP, PoolReference
from ..backends.pod_backend import PodSelection
from ..backends.selection import checked_label, checked_selector, checked_subdomain
from ..server.http2.tls import TlsSettings
from ..settings import Settings
from .flags import FEATURE_GATES
from .plugins.unsupported import last_entries

Values = Mapping[str, Any]
"""Flag name → value, of the flags that are given."""

_NAMESPACE: Final = "NAMESPACE"
_DEFAULT_NAMESPACE: Final = "default"
_DRAIN_SECONDS: Final = 30.0
_MAX_PORTS: Final = 8
_DEBUG_VERBOSITY: Final = 4
_LEVELS: Final = {"debug": "debug", "info": "info", "error": "error", "panic": "error"}
_SIZE: Final = re.compile(r"\s*(\d+)\s*(|[kMGT]|[KMGT]i)[Bb]?\s*", re.ASCII)
_POWERS: Final = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def selects_pods(values: Values) -> bool:
    """Whether the pods are named as for llm-d's EPP. Raises ValueError if they are named twice."""
    has_pool, has_selector = bool(values.get("pool-name")), bool(values.get("endpoint-selector"))
    if has_pool and has_selector:
        raise ValueError("--pool-name and --endpoint-selector exclude each other")
    return has_pool or has_selector


def with_values(settings: Settings, values: Values, environ: Mapping[str, str]) -> Settings:
    """`settings` as `values` change them. Raises ValueError."""
    if selects_pods(values):
        settings = replace(
            settings,
            pods=_pods(values, environ),
            tls=settings.tls or TlsSettings(),
            authorize_metrics=True,
            drain_timeout=_DRAIN_SECONDS,
        )
    settings = _with_configuration(settings, values)
    settings = _with_addresses(settings, values)
    settings = _with_log(settings, values)
    return replace(
        settings,
        tls=_tls(settings, values),
        metrics_tls=_metrics_tls(values),
        authorize_metrics=values.get("metrics-endpoint-auth", settings.authorize_metrics),
        drain_timeout=max(0.0, values.get("drain-timeout", settings.drain_timeout)),
        max_body=max(settings.max_body, _size("grpc-max-recv-msg-size", values)),
        tracing=values.get("tracing", settings.tracing),
        subset_hints=not values.get("disable-endpoint-subset-filter", False),
        feature_gates=_feature_gates(values),
    )


def _pods(values: Values, environ: Mapping[str, str]) -> PodSelection | PoolReference:
    namespace = values.get("pool-namespace") or environ.get(_NAMESPACE) or _DEFAULT_NAMESPACE
    checked_label("--pool-namespace", namespace)
    if name := values.get("pool-name"):
        group = checked_subdomain("--pool-group", values.get("pool-group") or GROUP)
        return PoolReference(namespace, checked_subdomain("--pool-name", name), group)
    ports = tuple(dict.fromkeys(values.get("endpoint-target-ports", ())))
    if not 1 <= len(ports) <= _MAX_PORTS:
        raise ValueError(
            f"--endpoint-selector needs --endpoint-target-ports with 1 to {_MAX_PORTS} ports"
        )
    for port in ports:
        _check_port("endpoint-target-ports", port)
    selector = checked_selector("--endpoint-selector", values["endpoint-selector"])
    return PodSelection(namespace, selector, ports)


def _with_configuration(settings: Settings, values: Values) -> Settings:
    file, text = values.get("config-file"), values.get("config-text")
    if file and text:
        raise ValueError("--config-file and --config-text exclude each other")
    if file:
        return replace(settings, config=Path(file))
    return replace(settings, config_text=text) if text else settings


def _feature_gates(values: Values) -> dict[str, bool]:
    try:
        gates = last_entries(values.get(FEATURE_GATES, ()))
        return {name: gate.is_on for name, gate in gates.items()}
    except ValueError as err:
        raise ValueError(f"--{FEATURE_GATES}: {err}") from err


def _with_addresses(settings: Settings, values: Values) -> Settings:
    fields = {"listen": "grpc-port", "health": "grpc-health-port", "metrics": "metrics-port"}
    changed: dict[str, Any] = {}
    for field, flag in fields.items():
        if (port := values.get(flag)) is not None:
            address: HostPort = getattr(settings, field)
            changed[field] = address._replace(port=_check_port(flag, port))
    return replace(settings, **changed)


def _with_log(settings: Settings, values: Values) -> Settings:
    level = settings.log_level
    named = str(values.get("zap-log-level", values.get("v", "")))
    if named.lstrip("-").isdigit():
        level = "debug" if int(named) >= _DEBUG_VERBOSITY else "info"
    elif named:
        if named not in _LEVELS:
            raise ValueError(f"--zap-log-level: {named!r} is neither a level nor a number")
        level = _LEVELS[named]
    encoder = values.get("zap-encoder", "console")
    if encoder not in ("json", "console"):
        raise ValueError(f"--zap-encoder: {encoder!r} is neither json nor console")
    return replace(settings, log_level=level, log_json=encoder == "json")


def _tls(settings: Settings, values: Values) -> TlsSettings | None:
    """TLS of ext_proc's port."""
    if not values.get("secure-serving", settings.tls is not None):
        return None
    tls = settings.tls or TlsSettings()
    if path := values.get("cert-path"):
        tls = replace(tls, directory=Path(path))
    if name := values.get("tls-min-version"):
        try:
            version = go_tls.tls_version(name)
        except ValueError as err:
            raise ValueError(f"--tls-min-version: {err}") from err
        # RFC 9113, 9.2: HTTP/2 needs 1.2.
        tls = replace(tls, minimum=max(version, ssl.TLSVersion.TLSv1_2))
    names = values.get("tls-cipher-suites", ())
    try:
        ciphers = go_tls.openssl_ciphers(names, go_tls.AEAD)
    except ValueError as err:
        raise ValueError(f"--tls-cipher-suites, with HTTP/2: {err}") from err
    if names and not ciphers:
        # Only ciphers of TLS 1.3 are allowed, so TLS 1.2 has none.
        tls = replace(tls, minimum=ssl.TLSVersion.TLSv1_3)
    return replace(tls, ciphers=ciphers)


def _metrics_tls(values: Values) -> TlsSettings | None:
    directory, authorities = values.get("metrics-cert-dir"), values.get("metrics-client-ca-file")
    if not directory:
        if authorities:
            raise ValueError("--metrics-client-ca-file needs --metrics-cert-dir")
        return None
    return TlsSettings(
        directory=Path(directory), client_ca=Path(authorities) if authorities else None
    )


def _size(flag: str, values: Values) -> int:
    """Bytes: a number with a unit such as Mi or MB, as Kubernetes' quantities; 0 if not given."""
    text = values.get(flag) or "0"
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"--{flag}: {text!r} is not a size: write 10MiB or 25MB")
    unit = match[2]
    base = 1024 if unit.endswith("i") else 1000
    power = _POWERS[unit[0]] if unit else 0
    return int(match[1]) * int(base**power)


def _check_port(flag: str, port: int) -> int:
    if not 1 <= port <= 65535:
        raise ValueError(f"--{flag}: {port} is not a port, 1 to 65535")
    return port
