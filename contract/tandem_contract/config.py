"""The router's configuration file: `disaggregated_serving`, `health_checks`, `kv_cache_index`,
`cache_salt`, `resume`, `flow_control`, `slo` and `backends`.

`load_router_config` reads one YAML file. Fields of an `EndpointPickerConfig` may stand beside these
eight; they belong to the EPP and are passed on in `extra`.

Errors: `documents.DocumentError`, with file, line and field.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from .api_paths import ApiPaths
from .config_variables import resolve_credentials
from .documents import Document, DocumentError, load_documents
from .durations import format_duration
from .labels import FABRIC_DOMAIN
from .paths import Role
from .plan import ResumeLimits
from .slo import SECTION as SLO
from .slo import Slo, read_slos

_UNKNOWN_FIELD: Final = re.compile("Object contains unknown field `(.*)`")
"""Message of msgspec."""
_KNOWN: Final = (
    "disaggregated_serving",
    "health_checks",
    "kv_cache_index",
    "cache_salt",
    "resume",
    "flow_control",
    SLO,
    "backends",
)


SplitMode = Literal["auto", "always"]
"""Which requests are split: those for which it is faster, or all that a prefill pod can take."""
MIN_PREFILL_LIMIT: Final = 16
"""Least `max_prefill_on_decode`, in tokens: a KV block, the end of which is never cached."""

_NO_HANDOFF: Final = "lets no hand-off succeed: write a time above 0"
_NO_CHECK: Final = "lets no check pass: write a time above 0"
_DURATIONS: Final[Mapping[tuple[str, str], str | None]] = {
    ("disaggregated_serving", "prefill_timeout"): _NO_HANDOFF,
    ("disaggregated_serving", "kv_transfer_timeout"): _NO_HANDOFF,
    ("health_checks", "interval"): "0 is no interval: write a time of at least 100ms",
    ("health_checks", "timeout"): _NO_CHECK,
    ("resume", "max_regeneration"): None,
    ("flow_control", "ttl"): "lets no request wait: to switch it off, write enabled: false",
    ("flow_control", "no_endpoint_ttl"): None,
}
"""Section and name of each duration, and what is wrong with one of 0; None: nothing."""
MAX_TTL: Final = 1740.0
"""Seconds that a request may wait in flow control at most: Envoy ends a request
after half an hour without a byte."""
MIN_CHECK_INTERVAL: Final = 0.1
"""Seconds: the shortest interval between two checks of a backend. The EPP reads the metrics of a
busy backend as often."""


class Credentials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Access to the external store. `repr` does not show the values, so no log contains them."""

    access_key: str
    secret_key: str

    def __repr__(self) -> str:
        return "Credentials(redacted)"


class ExternalStorage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A store outside the pods for KV tensors."""

    endpoint: str
    """URL: http://, https://, or file:/// for a directory that all backends mount."""
    kv_namespace: str = "inference/kv-cache"
    credentials: Credentials | None = None
    protocol: Literal["s3", "http", "file"] | None = None
    """None: file for file:///, s3 with credentials, else http."""


class DisaggregatedServing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether and how requests are split; durations are in seconds after loading."""

    enabled: bool = False
    """Whether any request is split."""
    split: SplitMode | None = None
    """always: all requests but those that one engine must serve alone, however short they are and
    whatever is cached. None, as auto: where a split is predicted to be faster."""
    max_prefill_on_decode: int | None = None
    """Tokens of a prompt that a decode pod computes at most, as long as a healthy prefill pod can:
    prompts with more uncached tokens are split. At least 16. None: no limit. Too low: short prompts
    wait for hand-offs. Too high: running decodes wait for prompts."""
    prefill_timeout: float | None = None
    """Seconds for all prefill attempts of a request together, at every sidecar that gets a signed
    plan. None: each sidecar's own, which is 30 by default. Too low: fallbacks under load."""
    kv_transfer_timeout: float | None = None
    """Seconds for a KV transfer and for a request that releases KV, as above. None: each sidecar's
    own, which is 10 by default. Too low: prompts whose KV is on its way are computed again."""
    fallback_to_unified: bool = True
    """Serve a request on one engine when a split is impossible; false: answer with an error."""
    default_external_storage: ExternalStorage | None = None
    domain_label: str = FABRIC_DOMAIN
    """Label that tells the fabric domain of Kubernetes pods without the label of the default. One
    that few pods have: transfers within a domain are taken for transfers beyond it."""
    api_paths: tuple[str, ...] = ()
    """Paths of the engines that clients may request, beside the inference API's, as
    `tandem_contract.api_paths` writes them."""


class HealthChecks(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How every backend is checked; durations are in seconds after loading.

    A check reads the backend's metrics page and, with `path`, requests that path first. It passes
    if both answer 2xx in time.
    """

    path: str | None = None
    """Path that is requested at the backend's URL, such as /health. None: the metrics page alone,
    which an engine may go on serving after its GPU failed."""
    interval: float = 2.0
    """Seconds between two checks of a backend that passes, at most; at least 0.1. The metrics of a
    busy backend are read more often. Too short: a hundred idle backends cost a part of a CPU core.
    Too long: the death of an idle backend is noticed late."""
    timeout: float = 2.0
    """Seconds for each request of a check. Too short: a backend that is slow under load fails its
    checks. Too long: one that hangs gets requests meanwhile."""
    unhealthy_threshold: int = 3
    """Failed checks in a row after which the backend gets no requests; before its first passed
    check one is enough. Lower: one lost packet takes a backend out, and its prefixes are
    forgotten."""
    healthy_threshold: int = 1
    """Passed checks in a row after which an unhealthy backend gets requests again. Higher: a
    backend that comes and goes stays out for longer."""


class StorageOffloading(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether the choice of a backend counts KV in external storage."""

    enabled: bool = False
    """Follow the engines' KV events of what their stores have, and let a decode backend load a
    prompt from there where that is cheaper than to compute it."""
    max_bytes: int = 64 << 20
    """Bytes of the index of all stores; at least 1 MiB. Some 28 bytes per KV block: the default has
    2.4 million blocks. Too low: the index of the
    largest store begins anew, and chunks that engines load without storing are not found again."""


class KvCacheIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of KV that engines have stored."""

    storage_offloading: StorageOffloading = msgspec.field(default_factory=StorageOffloading)


class CacheSalt(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether tenants use each other's cached prefixes."""

    from_header: str | None = None
    """Header of a request that names its tenant; the proxy in front must set it, or check it. The
    body then gets a `cache_salt` of the tenant. None: all clients share prefixes. Each tenant
    computes a common system prompt itself then."""


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether a stream goes on at another engine when its own fails; see `plan.ResumeLimits`."""

    enabled: bool | Literal["auto", "always", "never"] = "never"
    """An EPP asks the sidecars for it in its signed plans. auto is always here, as a file says
    nothing about the engines, and each stream shows whether its own gives token ids. true is
    always, false is never."""
    max_regeneration: float = ResumeLimits().max_regeneration
    """Seconds; 0: only streams that are continued by token ids go on."""
    max_moves: int = ResumeLimits().max_moves
    """At least 1. A sidecar has as many other engines as the plan has alternates, mostly one."""

    @property
    def limits(self) -> ResumeLimits | None:
        """Of a stream; None: none goes on."""
        if self.enabled in {False, "never"}:
            return None
        return ResumeLimits(self.max_regeneration, self.max_moves)


class FlowBand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What holds for the requests of one priority; None: what holds for all."""

    priority: int
    ttl: float | None = None
    """Seconds."""
    max_requests: int | None = None


class FlowClient(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an API key stands for; a client's own headers do not count then."""

    name: str
    """The client's, as the Secret or the directory of API keys has it."""
    priority: int = 0
    """Of its requests."""
    tenant: str = ""
    """Whose share its requests take; empty: its own."""


class FlowControl(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether requests wait in the EPP while no pod has room; durations are in seconds after
    loading."""

    enabled: bool = False
    """Hold requests and let the important go first; else all wait in the engines' queues."""
    ttl: float = 60.0
    """Seconds that a request waits at most; then it is answered with 429. Too long: clients have
    given up."""
    no_endpoint_ttl: float = 0.0
    """Seconds that a request waits for the first pod of its model; 0: it gets 503 at once."""
    max_requests: int = 5000
    """Requests of each priority that may wait; the next one gets 429."""
    max_bytes: int = 1 << 30
    """Bytes of all bodies that may wait; at most half of what the process may hold in all."""
    fairness: Literal["requests", "tokens"] = "requests"
    """What tenants of one priority get equally much of."""
    order: Literal["arrival", "deadline"] = "arrival"
    """Of a tenant's requests: those that came first go first, or those whose time ends first."""
    displace: bool = False
    """Whether a request for which there are too many bytes takes the place of one of a lower
    priority."""
    propagate_priority: bool = False
    """Whether engines are told the priorities, for their own queues. An engine that was not started
    with --scheduling-policy priority refuses every request whose priority is not 0."""
    bands: tuple[FlowBand, ...] = ()
    """Priorities that are treated differently."""
    models: tuple[str, ...] = ()
    """Models whose pods may come while others are there: their requests wait, too."""
    clients: tuple[FlowClient, ...] = ()
    """Clients with API keys; the others have priority 0, and each is a tenant of its own."""


class BackendCredentials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine asks of its clients. `repr` does not show it."""

    api_key: str
    """vLLM's `--api-key`. `tandem-router` sends it as a bearer token, instead of what the client
    sent; Envoy and the sidecars, which the EPP only directs, pass on the client's."""

    def __repr__(self) -> str:
        return "BackendCredentials(redacted)"


class Backend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine, or sidecar in front of an engine, that the router may choose."""

    name: str
    url: str
    role: Role = Role.UNIFIED
    weight: int = 1
    """Share of the load among the backends of its role; at least 1."""
    external_storage: ExternalStorage | None = None
    credentials: BackendCredentials | None = None
    models: tuple[str, ...] = ()
    """Names of the models it serves; empty: any model."""
    compat: str | None = None
    """KV compatibility hash: hand-offs take place only between backends with the same value."""
    node: str | None = None
    """Name of the machine that it runs on; None: not known."""
    domain: str | None = None
    """Name of the fabric domain of that machine, such as a rack or an RDMA island; None: not
    known."""
    http2: bool = False
    """Whether it speaks HTTP/2 without TLS (h2c) and no HTTP/1.1: the EPP then reads its metrics by
    HTTP/2. A gateway that forwards to it has a setting of its own."""
    labels: dict[str, str] = {}
    """Labels for the EPP's filters and scorers by label. Of a Kubernetes pod: its own, those that
    it selects nodes by, and its node's name as `kubernetes.io/hostname`."""

    @property
    def address(self) -> str:
        """`host:port` (`[v6]:port`) of the URL, port 80 or 443 when it names none."""
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"


class RouterConfig(msgspec.Struct, frozen=True):
    """The file as a whole."""

    disaggregated_serving: DisaggregatedServing = msgspec.field(
        default_factory=DisaggregatedServing
    )
    health_checks: HealthChecks = msgspec.field(default_factory=HealthChecks)
    kv_cache_index: KvCacheIndex = msgspec.field(default_factory=KvCacheIndex)
    cache_salt: CacheSalt = msgspec.field(default_factory=CacheSalt)
    resume: Resume = msgspec.field(default_factory=Resume)
    flow_control: FlowControl = msgspec.field(default_factory=FlowControl)
    slo: dict[str, Slo] = msgspec.field(default_factory=dict)
    """By the name of the model, or adapter, that requests ask for. Where one is given, pods are
    chosen such that few requests miss it."""
    backends: tuple[Backend, ...] = ()
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """The other top-level fields: the EPP's scheduling configuration."""


def load_router_config(file: Path, environ: Mapping[str, str] = os.environ) -> RouterConfig:
    """Read, check and resolve `file`.

    Raises DocumentError when it is no single YAML mapping, a field is unknown or of the wrong
    type, a duration does not parse, a `${VAR}` in credentials is not set, a weight, threshold
    or number of moves is below 1, a URL is not http(s), or two backends share a name.
    """
    documents = load_documents(file)
    if len(documents) != 1 or not isinstance(documents[0].data, dict):
        raise DocumentError(
            f"{file}:1: expected one YAML mapping with {_KNOWN[0]} and {_KNOWN[-1]}"
        )
    return router_config(documents[0], environ)


def router_config(document: Document, environ: Mapping[str, str]) -> RouterConfig:
    """The configuration in a loaded document; raises as `load_router_config`."""
    # A copy of the top level: the document keeps its values for other readers.
    data = dict(document.data)
    _resolve_durations(document, data)
    # Before the conversion, which forgets the lines that errors name.
    resolve_credentials(document, data, _KNOWN, environ)
    for key in data:
        if not isinstance(key, str):
            raise document.error([key], "is not a field name: field names are text")
    # An empty section in YAML is null and means: all defaults.
    fields = {key: value for key in _KNOWN if (value := data.pop(key, None)) is not None}
    slos = read_slos(document, [SLO], fields.pop(SLO, {}))
    try:
        config = msgspec.convert({**fields, "extra": data}, type=RouterConfig)
    except msgspec.ValidationError as err:
        # msgspec ends its message with the path of the wrong field.
        message, _, path = str(err).partition(" - at `")
        path = path.rstrip("`").removeprefix("$").removeprefix(".")
        if path.endswith(".role") and message.startswith("Invalid enum value"):
            message += f": a role is {', '.join(Role)}"
        elif path == "disaggregated_serving.split":
            # YAML reads an `off` without quotes as false.
            message = "is auto or always; to split no request, write enabled: false"
        if (unknown := _UNKNOWN_FIELD.fullmatch(message)) is not None:
            # The line of the field itself, not of the object that has it.
            path = f"{path}.{unknown[1]}"
        raise document.error(path, message) from err
    _check_health_checks(document, config.health_checks)
    if config.kv_cache_index.storage_offloading.max_bytes < 1 << 20:
        message = "is too small: write at least 1048576"
        raise document.error("kv_cache_index.storage_offloading.max_bytes", message)
    if config.resume.max_moves < 1:
        message = f"{config.resume.max_moves} is below 1: to move no stream, write enabled: never"
        raise document.error("resume.max_moves", message)
    _check_flow(document, config.flow_control)
    _check_backends(document, config)
    _check_split(document, config.disaggregated_serving)
    _check_api_paths(document, config.disaggregated_serving.api_paths)
    storage = config.disaggregated_serving.default_external_storage
    _check_storage(document, "disaggregated_serving.default_external_storage", storage)
    return msgspec.structs.replace(config, slo=slos)


def _resolve_durations(document: Document, data: dict[str, Any]) -> None:
    """Replace the text of every duration by its seconds."""
    for (section, name), mistake in _DURATIONS.items():
        fields = data.get(section)
        if isinstance(fields, dict) and name in fields:
            seconds = document.seconds(f"{section}.{name}", fields[name], mistake)
            data[section] = {**fields, name: seconds}
    flow = data.get("flow_control")
    bands = flow.get("bands") if isinstance(flow, dict) else None
    if isinstance(bands, list):
        resolved = [_resolved_band(document, i, band) for i, band in enumerate(bands)]
        data["flow_control"] = {**data["flow_control"], "bands": resolved}


def _resolved_band(document: Document, number: int, band: object) -> object:
    if not isinstance(band, dict) or "ttl" not in band:
        return band
    path, mistake = f"flow_control.bands[{number}].ttl", _DURATIONS["flow_control", "ttl"]
    return {**band, "ttl": document.seconds(path, band["ttl"], mistake)}


def _check_flow(document: Document, flow: FlowControl) -> None:
    times = {"ttl": flow.ttl, "no_endpoint_ttl": flow.no_endpoint_ttl}
    times |= {f"bands[{i}].ttl": band.ttl or 0.0 for i, band in enumerate(flow.bands)}
    for name, seconds in times.items():
        if seconds > MAX_TTL:
            message = f"{format_duration(seconds)} is too long: write at most 29m"
            raise document.error(f"flow_control.{name}", message)
    limits = {"max_requests": flow.max_requests, "max_bytes": flow.max_bytes}
    for i, band in enumerate(flow.bands):
        if band.priority in {other.priority for other in flow.bands[:i]}:
            message = f"{band.priority} is in the list already: write one entry for each priority"
            raise document.error(f"flow_control.bands[{i}].priority", message)
        if band.max_requests is not None:
            limits[f"bands[{i}].max_requests"] = band.max_requests
    for i, client in enumerate(flow.clients):
        if client.name in {other.name for other in flow.clients[:i]}:
            message = f"{client.name} is in the list already: write one entry for each client"
            raise document.error(f"flow_control.clients[{i}].name", message)
    for name, limit in limits.items():
        if limit < 1:
            message = f"{limit} is below 1: to let no request wait, write enabled: false"
            raise document.error(f"flow_control.{name}", message)


def _check_split(document: Document, serving: DisaggregatedServing) -> None:
    limit, least = serving.max_prefill_on_decode, MIN_PREFILL_LIMIT
    if limit is not None and limit < least:
        message = f"{limit} is below {least}: to split all requests, write split: always"
        raise document.error("disaggregated_serving.max_prefill_on_decode", message)


def _check_health_checks(document: Document, checks: HealthChecks) -> None:
    at = "health_checks"
    if checks.interval < MIN_CHECK_INTERVAL:
        message = f"{format_duration(checks.interval)} is too short: write at least 100ms"
        raise document.error(f"{at}.interval", message)
    if checks.path is not None and not checks.path.startswith("/"):
        raise document.error(f"{at}.path", f"{checks.path!r} is not a path: begin with /")
    for name in ("unhealthy_threshold", "healthy_threshold"):
        if (threshold := getattr(checks, name)) < 1:
            raise document.error(f"{at}.{name}", f"{threshold} is below 1")


def _check_backends(document: Document, config: RouterConfig) -> None:
    first: dict[str, int] = {}
    for i, backend in enumerate(config.backends):
        at = f"backends[{i}]"
        if backend.name in first:
            other = document.where(f"backends[{first[backend.name]}].name")
            raise document.error(
                f"{at}.name",
                f"{backend.name!r} is taken by the backend at {other}: names are unique",
            )
        first[backend.name] = i
        if not backend.name:
            raise document.error(f"{at}.name", "is empty: give every backend a name")
        if backend.weight < 1:
            raise document.error(f"{at}.weight", f"{backend.weight} is below 1")
        _check_url(document, f"{at}.url", backend.url)
        if backend.http2 and urlsplit(backend.url).scheme != "http":
            raise document.error(f"{at}.http2", "is for URLs with http: HTTP/2 without TLS")
        _check_storage(document, f"{at}.external_storage", backend.external_storage)


def _check_api_paths(document: Document, paths: tuple[str, ...]) -> None:
    for i, path in enumerate(paths):
        try:
            ApiPaths([path])
        except ValueError as err:
            raise document.error(f"disaggregated_serving.api_paths[{i}]", str(err)) from err


def _check_storage(document: Document, path: str, storage: ExternalStorage | None) -> None:
    if storage is None:
        return
    is_file = storage.endpoint.startswith("file:///")
    if {*storage.endpoint} & ({*"?#"} if is_file else {*"@?#"}):
        # Before any check that quotes the URL.
        raise document.error(
            f"{path}.endpoint", "has a user, a password or a query: write keys into `credentials`"
        )
    if not is_file:
        _check_url(document, f"{path}.endpoint", storage.endpoint)
    if storage.protocol is not None and (storage.protocol == "file") != is_file:
        raise document.error(
            f"{path}.protocol", f"{storage.protocol} does not fit the endpoint {storage.endpoint!r}"
        )


def _check_url(document: Document, path: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = None
    if not usable:
        raise document.error(path, f"{url!r} is not a URL: write http://HOST:PORT")
