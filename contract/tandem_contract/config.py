"""The router's configuration file: `disaggregated_serving` and `backends`.

`load_router_config` reads one YAML file. Fields of an `EndpointPickerConfig` may stand beside these
two; they belong to the EPP and are passed on in `extra`.

Errors: `documents.DocumentError`, with file, line and field.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import msgspec

from .api_paths import ApiPaths
from .documents import Document, DocumentError, load_documents
from .durations import parse_duration
from .labels import FABRIC_DOMAIN
from .paths import Role

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_KNOWN: Final = ("disaggregated_serving", "backends")


class Credentials(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Access to the external store. `repr` does not show the values, so no log contains them."""

    access_key: str
    secret_key: str

    def __repr__(self) -> str:
        return "Credentials(redacted)"


class ExternalStorage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A store outside the pods for KV tensors."""

    endpoint: str
    kv_namespace: str = "inference/kv-cache"
    credentials: Credentials | None = None


class DisaggregatedServing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Whether and how requests are split; durations are in seconds after loading."""

    enabled: bool = False
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


class Backend(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One engine, or sidecar in front of an engine, that the router may choose."""

    name: str
    url: str
    role: Role = Role.UNIFIED
    weight: int = 1
    """Share of the load among the backends of its role; at least 1."""
    external_storage: ExternalStorage | None = None
    models: tuple[str, ...] = ()
    """Names of the models it serves; empty: any model."""
    compat: str | None = None
    """KV compatibility hash: hand-offs take place only between backends with the same value."""
    node: str | None = None
    """Name of the machine that it runs on; None: not known."""
    domain: str | None = None
    """Name of the fabric domain of that machine, such as a rack or an RDMA island; None: not
    known."""
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
    backends: tuple[Backend, ...] = ()
    extra: dict[str, Any] = msgspec.field(default_factory=dict)
    """The other top-level fields: the EPP's scheduling configuration."""


def load_router_config(file: Path, environ: Mapping[str, str] = os.environ) -> RouterConfig:
    """Read, check and resolve `file`.

    Raises DocumentError when it is no single YAML mapping, a field is unknown or of the wrong
    type, a duration does not parse, a `${VAR}` in credentials is not set, a weight is below 1,
    a URL is not http(s), or two backends share a name.
    """
    documents = load_documents(file)
    if len(documents) != 1 or not isinstance(documents[0].data, dict):
        raise DocumentError(f"{file}:1: expected one YAML mapping with {' and '.join(_KNOWN)}")
    return router_config(documents[0], environ)


def router_config(document: Document, environ: Mapping[str, str]) -> RouterConfig:
    """The configuration in a loaded document; raises as `load_router_config`."""
    # A copy of the top level: the document keeps its values for other readers.
    data = dict(document.data)
    _resolve_durations(document, data)
    # Before the conversion, which forgets the lines that errors name.
    _resolve_credentials(document, data, environ)
    for key in data:
        if not isinstance(key, str):
            raise document.error([key], "is not a field name: field names are text")
    # An empty section in YAML is null and means: all defaults.
    fields = {key: value for key in _KNOWN if (value := data.pop(key, None)) is not None}
    try:
        config = msgspec.convert({**fields, "extra": data}, type=RouterConfig)
    except msgspec.ValidationError as err:
        # msgspec ends its message with the path of the wrong field.
        message, _, path = str(err).partition(" - at `")
        if message.startswith("Invalid enum value"):
            message += f": a role is {', '.join(Role)}"
        raise document.error(path.rstrip("`").removeprefix("$").removeprefix("."), message) from err
    _check_backends(document, config)
    _check_api_paths(document, config.disaggregated_serving.api_paths)
    storage = config.disaggregated_serving.default_external_storage
    _check_storage(document, "disaggregated_serving.default_external_storage", storage)
    return config


def _resolve_durations(document: Document, data: dict[str, Any]) -> None:
    section = data.get("disaggregated_serving")
    if not isinstance(section, dict):
        return
    resolved = dict(section)
    for name in ("prefill_timeout", "kv_transfer_timeout"):
        if name not in resolved:
            continue
        path = f"disaggregated_serving.{name}"
        # A bare number in YAML is refused: its unit would be a guess.
        if not isinstance(resolved[name], str):
            raise document.error(path, f'{resolved[name]!r} has no unit: write "30s" or "250ms"')
        try:
            resolved[name] = parse_duration(resolved[name])
        except ValueError as err:
            raise document.error(path, str(err)) from err
        if resolved[name] == 0:
            raise document.error(path, "lets no hand-off succeed: write a time above 0")
    data["disaggregated_serving"] = resolved


def _resolve_credentials(document: Document, data: dict[str, Any], env: Mapping[str, str]) -> None:
    """Replace `${VAR}` by the environment's value in every `credentials`, at any depth."""

    def walk(node: Any, path: tuple[str | int, ...]) -> Any:
        if isinstance(node, list):
            return [walk(value, (*path, i)) for i, value in enumerate(node)]
        if isinstance(node, dict):
            return {key: walk(value, (*path, key)) for key, value in node.items()}
        # Only in credentials: a `$` in any other field stays as it is written.
        if isinstance(node, str) and "credentials" in path:
            return _expand(document, path, node, env)
        return node

    for key in _KNOWN:
        if key in data:
            data[key] = walk(data[key], (key,))


def _expand(
    document: Document, path: tuple[str | int, ...], text: str, env: Mapping[str, str]
) -> str:
    for name in _VARIABLE.findall(text):
        if name not in env:
            raise document.error(path, f"${{{name}}} is not set in the environment: export {name}")
    return _VARIABLE.sub(lambda match: env[match[1]], text)


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
        _check_storage(document, f"{at}.external_storage", backend.external_storage)


def _check_api_paths(document: Document, paths: tuple[str, ...]) -> None:
    for i, path in enumerate(paths):
        try:
            ApiPaths([path])
        except ValueError as err:
            raise document.error(f"disaggregated_serving.api_paths[{i}]", str(err)) from err


def _check_storage(document: Document, path: str, storage: ExternalStorage | None) -> None:
    if storage is not None:
        _check_url(document, f"{path}.endpoint", storage.endpoint)


def _check_url(document: Document, path: str, url: str) -> None:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = None
    if not usable:
        raise document.error(path, f"{url!r} is not a URL: write http://HOST:PORT")
