"""The router's file, as the EPP reads it, and what follows from it for the hand-off.

A file without scheduling and objectives gets `LEAST_IN_FLIGHT`: each phase goes to the healthy
backend with the fewest requests in flight, divided by its weight, and every prompt is split that is
not cached.

Errors: `DocumentError`, with file, line and field.
"""

import logging
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from tandem_contract.commandline import HostPort, parse_host_port
from tandem_contract.config import Backend
from tandem_contract.connectors import ConnectorName
from tandem_contract.documents import DocumentError, load_documents
from tandem_epp.llmd.plugins.config import load_routing
from tandem_epp.process.configuration import Configuration, log_notices, read
from tandem_http1.messages import Headers
from tandem_sidecar.settings import Policy, Settings

_log: Final = logging.getLogger(__name__)
_SCORERS: Final = (
    {"pluginRef": "active-request-scorer"},
    # It decides between backends with equal loads only: among fewer than a thousand requests in
    # flight, one more of them changes the other score by more than this weight.
    {"pluginRef": "prefix-cache-scorer", "weight": 0.001},
)
LEAST_IN_FLIGHT: Final[Mapping[str, Any]] = {
    "plugins": [
        {"type": "active-request-scorer"},
        {"type": "prefix-cache-scorer"},
        {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 1}},
    ],
    "schedulingProfiles": [
        {"name": "decode", "plugins": list(_SCORERS)},
        {"name": "prefill", "plugins": list(_SCORERS)},
    ],
}
"""The scheduling of a file that names none, as an EndpointPickerConfig."""


def load(file: Path, environ: Mapping[str, str], *, lists_backends: bool = True) -> Configuration:
    """Read and check `file`. Raises DocumentError.

    `lists_backends`: whether it must list the backends. Of those of a cluster it lists none, and
    says what the file of an EPP says, with the same defaults.
    """
    documents = load_documents(file)
    configuration = read(documents, str(file), environ, lists_backends=lists_backends)
    if not lists_backends:
        return configuration
    for i, backend in enumerate(configuration.router.backends):
        if backend.http2:
            raise documents[0].error(
                f"backends[{i}].http2", "the router calls engines by HTTP/1.1 only: leave it out"
            )
    if configuration.router.extra or configuration.router.slo:
        return configuration
    serving = configuration.router.disaggregated_serving
    routing = load_routing(
        documents[0], LEAST_IN_FLIGHT, serving, flow=configuration.router.flow_control
    )
    return replace(configuration, routing=routing)


def reloaded(
    file: Path, *, lists_backends: bool = True, is_worker: bool = False
) -> Configuration | None:
    """The configuration that `file` holds now; None, and a line in the log, if it is unusable.

    `lists_backends` as for `load`. `is_worker`: the supervisor logs the change, once for all
    workers.
    """
    try:
        configuration = load(file, os.environ, lists_backends=lists_backends)
    except DocumentError as err:
        _log.error("the configuration was not reloaded, the last good one stays: %s", err)
        return None
    if not is_worker:
        _log.info("%s: reloaded, %d backends", file, len(configuration.router.backends))
        log_notices(configuration)
    return configuration


def log_ignored_storage(configuration: Configuration, connector: str) -> None:
    """Warn of an external store that does not do what its user would expect. `connector`: the flag,
    which says how KV moves in a hand-off."""
    router = configuration.router
    stores = [router.disaggregated_serving.default_external_storage]
    stores += [backend.external_storage for backend in router.backends]
    if not any(store is not None for store in stores):
        return
    if connector != ConnectorName.STORAGE:
        _log.warning(
            "external_storage moves no KV from prefill to decode: with --connector %s it goes "
            "directly; start the router with --connector storage to hand it off through the store",
            connector,
        )
    if not router.kv_cache_index.storage_offloading.enabled:
        _log.warning(
            "external_storage has no effect: set kv_cache_index.storage_offloading.enabled, so "
            "that backends are also chosen by what their stores have"
        )


def handoff_settings(configuration: Configuration, flags: Settings) -> Settings:
    """The settings of the data path: those of `flags`, and what the file says."""
    serving = configuration.routing.serving
    prefill, transfer = serving.prefill_timeout, serving.kv_transfer_timeout
    if (resume := configuration.router.resume.limits) is not None:
        flags = replace(
            flags,
            resume=True,
            resume_max_regeneration=resume.max_regeneration,
            resume_max_moves=resume.max_moves,
        )
    return replace(
        flags,
        policy=Policy(fallback_to_unified=serving.fallback_to_unified),
        prefill_timeout=flags.prefill_timeout if prefill is None else prefill,
        kv_transfer_timeout=flags.kv_transfer_timeout if transfer is None else transfer,
    )


def address_of(backend: Backend) -> HostPort:
    """Where the engine of `backend` is connected to; its host may be a name, which TLS verifies."""
    return parse_host_port(backend.address)


def authorizations(backends: Iterable[Backend]) -> dict[HostPort, Headers]:
    """The Authorization header of each backend that has an API key, by its address."""
    return {
        address_of(backend): [(b"authorization", f"Bearer {backend.credentials.api_key}".encode())]
        for backend in backends
        if backend.credentials is not None
    }


def tls_addresses(backends: Iterable[Backend]) -> frozenset[HostPort]:
    """The addresses of the backends with an https URL."""
    return frozenset(address_of(b) for b in backends if urlsplit(b.url).scheme == "https")
