"""From values of llm-d's flags to those of Tandem's; pure. `llmd_flags` says what each does.

Errors: `Refused`: a value that cannot be followed; the message names the flag and what to use.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from tandem_contract import go_tls
from tandem_contract.commandline import HostPort
from tandem_contract.connectors import ConnectorName

from .connectors import UnknownConnector
from .flag_values import Engine, connector_name
from .process.listen import EVERY_ADDRESS
from .security.route import AllowList, parse_allow

PRIVATE_NETWORKS: Final = (
    "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7",
)  # fmt: skip
"""Networks that pods have their addresses from on most clusters."""

_DEBUG_LEVEL: Final = 4
"""Lowest number of llm-d's verbosity at which it logs for debugging."""
_MINIMUM_TLS: Final = "VersionTLS12"
_STAGES: Final = frozenset({"prefiller", "decoder", "encoder"})
_PEER_PORTS: Final = {
    ConnectorName.MOONCAKE.value: "mooncake-bootstrap-port",
    ConnectorName.OFFLOADING.value: "p2p-connector-port",
}
"""Connector → llm-d's flag for its peer port."""

Flags = dict[str, Any]
"""Tandem's flags, by parameter name."""


class Refused(ValueError):
    """The value of a flag is refused."""


@dataclass(frozen=True, slots=True)
class Given:
    """The flags of llm-d that have a value."""

    values: Mapping[str, Any]
    """By name; a list is one tuple."""
    explicit: frozenset[str]
    """Names of those on the command line or in a file, and not in an environment variable."""
    typed: frozenset[str]
    """Those of them that are on the command line."""
    tandem: frozenset[str]
    """Tandem's parameters that do not have their default."""

    def get(self, name: str, otherwise: Any = None) -> Any:
        """The value of the flag `name`."""
        return self.values.get(name, otherwise)

    def stages(self, name: str) -> frozenset[str]:
        """The stages that a list names. Raises Refused."""
        stages = frozenset(self.get(name, ()))
        if not stages <= _STAGES:
            raise Refused(f"--{name}: stages are {', '.join(sorted(_STAGES))}")
        return stages

    def check_alone(self, name: str, parameter: str) -> None:
        """Raise Refused if Tandem's flag for the same setting is given, too."""
        if parameter in self.tandem:
            raise Refused(f"--{name} and --{parameter} set the same: give one of them")


def translate(given: Given, flags: Flags) -> tuple[Flags, list[str]]:
    """`flags` with what llm-d's flags say, and log lines about defaults. Raises Refused."""
    flags = flags | _addresses(given, flags) | _connector(given, flags)
    flags = flags | _tls(given, flags) | _tls_for_clients(given) | _logs(given)
    lines = _trust(given, flags)
    if "prefill-max-retries" in given.values:
        given.check_alone("prefill-max-retries", "retries")
        flags["retries"] = max(0, min(16, given.get("prefill-max-retries")))
    flags["sample_prefillers"] = given.get("enable-prefiller-sampling", False)
    flags["spans"] = given.get("tracing", not given.explicit)
    return flags, lines


def _addresses(given: Given, flags: Flags) -> Flags:
    changes: Flags = {"ranks": given.get("data-parallel-size", 1)}
    if changes["ranks"] < 1:
        raise Refused("--data-parallel-size: write a number from 1 on")
    if "port" in given.values:
        given.check_alone("port", "listen")
        changes["listen"] = HostPort(EVERY_ADDRESS, _port(given, "port", changes["ranks"]))
    if given.get("metrics-port"):
        given.check_alone("metrics-port", "admin")
        changes["admin"] = HostPort(EVERY_ADDRESS, _port(given, "metrics-port", 1))
    # The older name counts only if it is on the command line and the newer is not.
    names = [name for name in ("model-server-port", "vllm-port") if name in given.values]
    names.sort(key=lambda name: name not in given.typed)
    if names:
        given.check_alone(names[0], "engine")
        port = _port(given, names[0], changes["ranks"])
        changes["engine"] = flags["engine"]._replace(address=HostPort("127.0.0.1", port))
    return changes


def _port(given: Given, name: str, ranks: int) -> int:
    port: int = given.get(name)
    if not 1 <= port <= 65536 - ranks:
        raise Refused(f"--{name}: {port} is not a port, or there are too few above it")
    return port


def _connector(given: Given, flags: Flags) -> Flags:
    name = flags["connector"]
    if "kv-connector" in given.values:
        try:
            name = connector_name(given.get("kv-connector"))
        except UnknownConnector as err:
            raise Refused(f"--kv-connector: {err}") from err
    changes = {"connector": name}
    flag = _PEER_PORTS.get(name, "")
    if flag in given.values:
        # From the environment it is a default.
        if flag in given.explicit:
            given.check_alone(flag, "peer_port")
        if flags["peer_port"] is None or flag in given.explicit:
            changes["peer_port"] = _port(given, flag, 1)
    return changes


def _tls(given: Given, flags: Flags) -> Flags:
    """TLS to engines."""
    stages, unverified = given.stages("enable-tls"), given.stages("tls-insecure-skip-verify")
    # What is inside `flags` already: the engine's address may have changed.
    engine: Engine = flags["engine"]
    return {
        "engine": Engine(
            engine.address,
            engine.tls or "decoder" in stages or given.get("decoder-use-tls", False),
        ),
        "prefill_tls": flags["prefill_tls"]
        or "prefiller" in stages
        or given.get("prefiller-use-tls", False),
        "unverified_engine": "decoder" in unverified
        or given.get("decoder-tls-insecure-skip-verify", False),
        "unverified_prefill": "prefiller" in unverified
        or given.get("prefiller-tls-insecure-skip-verify", False),
    }


def _tls_for_clients(given: Given) -> Flags:
    try:
        minimum = go_tls.tls_version(given.get("tls-min-version") or _MINIMUM_TLS)
    except ValueError as err:
        raise Refused("--tls-min-version: write VersionTLS12 or VersionTLS13") from err
    if minimum < ssl.TLSVersion.TLSv1_2:
        raise Refused("--tls-min-version: write VersionTLS12 or VersionTLS13: older are unsafe")
    names = given.get("tls-cipher-suites", ())
    try:
        ciphers = go_tls.openssl_ciphers(names, go_tls.WITH_CBC)
    except ValueError as err:
        raise Refused(f"--tls-cipher-suites: {err}") from err
    if names and not ciphers:
        # Only ciphers of TLS 1.3 are allowed, so TLS 1.2 has none.
        minimum = ssl.TLSVersion.TLSv1_3
    return {
        "secure_serving": _is_serving_secure(given),
        "cert_path": Path(given.get("cert-path")) if given.get("cert-path") else None,
        "tls_min_version": minimum,
        "tls_cipher_suites": ciphers,
    }


def _is_serving_secure(given: Given) -> bool:
    """Whether clients connect over TLS. The command line comes before a file, as in llm-d."""
    names = [name for name in ("secure-serving", "secure-proxy") if name in given.values]
    names = [name for name in names if name in given.typed] or names
    values = {bool(given.get(name)) for name in names}
    if len(values) > 1:
        raise Refused("--secure-serving and --secure-proxy set the same: give one of them")
    return values.pop() if values else bool(given.explicit)


def _logs(given: Given) -> Flags:
    changes: Flags = {}
    if "zap-encoder" in given.values:
        formats = {"json": "json", "console": "text"}
        if given.get("zap-encoder") not in formats:
            raise Refused("--zap-encoder: write json or console")
        changes["log_format"] = formats[given.get("zap-encoder")]
    if given.get("zap-devel"):
        changes["log_level"] = "debug"
    for name in ("zap-log-level", "v"):
        if name in given.values:
            changes["log_level"] = _level(name, str(given.get(name)))
    return changes


def _level(name: str, text: str) -> str:
    levels = {"debug": "debug", "info": "info", "error": "error", "panic": "error"}
    if text in levels:
        return levels[text]
    if not text.isdecimal():
        raise Refused(f"--{name}: write {', '.join(levels)} or a number")
    return "debug" if int(text) >= _DEBUG_LEVEL else "info"


def _trust(given: Given, flags: Flags) -> list[str]:
    """Set the allow-list in `flags` where llm-d's default applies; the lines that say so."""
    allow: AllowList = flags["prefill_allow"]
    is_limited = flags["plan_key_dir"] is not None or allow != AllowList()
    if given.get("enable-ssrf-protection"):
        if not is_limited:
            raise Refused(
                "--enable-ssrf-protection: the sidecar does not read an InferencePool: name the"
                " prefill pods by --prefill-allow, or use signed plans by --plan-key-dir"
            )
        return []
    if is_limited or not given.explicit:
        return []
    flags["prefill_allow"] = parse_allow(PRIVATE_NETWORKS)
    return [
        "prefill pods with private addresses may be named by the header x-prefiller-host-port:"
        " --prefill-allow limits them, --plan-key-dir allows only signed plans"
    ]
