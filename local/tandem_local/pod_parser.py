"""Pod JSON → the types of `pod_spec`, with addresses, variables and mount paths resolved.

Addresses: a pod's containers share one 127.x.y.z. They reach each other at `status.podIP`, because
all pods of this machine share 127.0.0.1. `tcp://*:PORT` means all addresses of the pod and becomes
`tcp://127.x.y.z:PORT`. (vLLM publishes KV events only on wildcard addresses: with the one address
that it is given here, it does not publish them.)

Volumes: a process has no mount namespace, so a volume is a directory of this machine (emptyDir and
downwardAPI: below the run directory; secret: the directory given to the runner; hostPath: the path
itself). A `mountPath` at the start of a path in command, args, env values or exec handlers is
replaced by that directory: `--plan-key-dir=/var/run/keys` becomes `--plan-key-dir=RUN_DIR/…`.

Errors: `SetupError`, naming pod, container and field.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import msgspec

from .downward_api import FIELD
from .errors import SetupError
from .pod_fields import check_fields
from .pod_spec import (
    ContainerSpec,
    Exec,
    Handler,
    HttpGet,
    PodSpec,
    Probe,
    Sleep,
    TcpSocket,
)

_VARIABLE: Final = re.compile(r"\$(?:(\$)|\(([^)]*)\))")

_WILDCARD: Final = "tcp://*:"

VolumeSource = Callable[[str, Mapping[str, Any]], Path]
"""(volume name, volume JSON) → its directory on this machine; raises SetupError if it has none."""


class _Env(msgspec.Struct):
    name: str
    value: str = ""
    valueFrom: dict[str, Any] | None = None  # noqa: N815 - Kubernetes' name


def pod_name(document: Mapping[str, Any]) -> str:
    """`metadata.name`. Raises SetupError if it is missing."""
    metadata = document.get("metadata")
    name = metadata.get("name") if isinstance(metadata, Mapping) else None
    if not isinstance(name, str) or not name:
        raise SetupError("a pod has no metadata.name: the local runner needs one")
    return name


def parse_pod(document: Mapping[str, Any], *, address: str, volume: VolumeSource) -> PodSpec:
    """Check and resolve one Pod. Raises SetupError."""
    name = pod_name(document)
    check_fields(document)
    try:
        return _Parser(document, name, address, volume).pod()
    except (KeyError, TypeError, AttributeError, ValueError) as err:
        reason = f"{err.args[0]} is missing" if isinstance(err, KeyError) else str(err)
        raise SetupError(f"pod {name}: not a valid Pod: {reason}") from err


def expand(text: str, env: Mapping[str, str]) -> str:
    """Expand Kubernetes' `$(VAR)`: `$$` is a dollar sign, an unknown name stays as it is."""

    def value(match: re.Match[str]) -> str:
        if match[1]:
            return "$"
        return env.get(match[2], match[0])

    return _VARIABLE.sub(value, text)


def relocate(text: str, mounts: Mapping[str, Path]) -> str:
    """`text` with every mount path that starts a path replaced by its directory."""
    if not mounts:
        return text
    directories = {path.rstrip("/"): str(directory) for path, directory in mounts.items()}
    # Longest first: of /keys and /keys/deep the more specific mount applies.
    paths = "|".join(map(re.escape, sorted(directories, key=len, reverse=True)))
    # Match whole path components only: /keys occurs neither in /etc/keys nor in /keys2.
    return re.sub(rf"(?<![\w./~-])(?:{paths})(?![\w.-])", lambda m: directories[m[0]], text)


class _Parser:
    """Parses one Pod; holds what its containers share."""

    def __init__(
        self, document: Mapping[str, Any], name: str, address: str, volume: VolumeSource
    ) -> None:
        self._metadata: Mapping[str, Any] = document["metadata"]
        self._spec: Mapping[str, Any] = document["spec"]
        self._name = name
        self._address = address
        # The API server gives each replacement of a pod a new uid.
        self._uid = self._metadata.get("uid") or str(uuid4())
        self._volumes: dict[str, Path] = {
            v["name"]: volume(v["name"], v) for v in self._spec.get("volumes") or ()
        }

    def pod(self) -> PodSpec:
        always = self._spec.get("restartPolicy", "Always") == "Always"
        init = [(c, c.get("restartPolicy") == "Always") for c in self._list("initContainers")]
        return PodSpec(
            name=self._name,
            labels=self._metadata.get("labels") or {},
            address=self._address,
            containers=tuple(self._container(c, always) for c in self._list("containers")),
            init=tuple((self._container(c, sidecar), sidecar) for c, sidecar in init),
            grace=float(self._spec.get("terminationGracePeriodSeconds", 30)),
        )

    def _list(self, field_name: str) -> Sequence[Mapping[str, Any]]:
        return self._spec.get(field_name) or ()

    def _container(self, raw: Mapping[str, Any], restarts: bool) -> ContainerSpec:
        mounts = {m["mountPath"]: self._mount(m) for m in raw.get("volumeMounts") or ()}
        env = self._env(raw)
        own_address = f"tcp://{self._address}:"

        def resolve(words: Sequence[str]) -> tuple[str, ...]:
            # Variables first: their values may hold the wildcard address or a mount path.
            expanded = (expand(word, env).replace(_WILDCARD, own_address) for word in words)
            return tuple(relocate(word, mounts) for word in expanded)

        port_names = {
            p["name"]: int(p["containerPort"]) for p in raw.get("ports") or () if "name" in p
        }
        handlers = _HandlerParser(self._address, port_names, resolve)
        return ContainerSpec(
            name=raw["name"],
            image=raw.get("image", ""),
            command=(*resolve(raw.get("command") or ()), *resolve(raw.get("args") or ())),
            has_command=bool(raw.get("command")),
            env={key: relocate(value, mounts) for key, value in env.items()},
            working_dir=relocate(raw["workingDir"], mounts) if "workingDir" in raw else None,
            ports=tuple(int(p["containerPort"]) for p in raw.get("ports") or ()),
            resources=_extended_resources(raw.get("resources") or {}),
            startup=handlers.probe(raw.get("startupProbe")),
            readiness=handlers.probe(raw.get("readinessProbe")),
            liveness=handlers.probe(raw.get("livenessProbe")),
            pre_stop=handlers.handler((raw.get("lifecycle") or {}).get("preStop")),
            restarts=restarts,
        )

    def _mount(self, mount: Mapping[str, Any]) -> Path:
        if mount["name"] not in self._volumes:
            raise ValueError(f"volumeMounts: no volume is named {mount['name']!r}")
        return self._volumes[mount["name"]].joinpath(str(mount.get("subPath", "")))

    def _env(self, raw: Mapping[str, Any]) -> dict[str, str]:
        env: dict[str, str] = {}
        for item in msgspec.convert(raw.get("env") or [], list[_Env]):
            if item.valueFrom is not None:
                env[item.name] = self._field_ref(item.valueFrom["fieldRef"]["fieldPath"])
            else:
                # Only variables listed earlier are expanded, as in Kubernetes.
                env[item.name] = expand(item.value, env)
        return env

    def _field_ref(self, path: str) -> str:
        if match := FIELD.fullmatch(path):
            return str((self._metadata.get(match[1]) or {}).get(match[2], ""))
        values = {
            "metadata.name": self._name,
            "metadata.namespace": self._metadata.get("namespace", "default"),
            "metadata.uid": self._uid,
            "spec.nodeName": "localhost",
            "status.podIP": self._address,
            "status.podIPs": self._address,
            "status.hostIP": self._address,
        }
        if path not in values:
            raise SetupError(
                f"pod {self._name}: fieldRef {path}: the local runner does not support this field"
            )
        return str(values[path])


class _HandlerParser:
    """Parses the probe and lifecycle handlers of one container."""

    def __init__(
        self,
        address: str,
        ports: Mapping[str, int],
        resolve: Callable[[Sequence[str]], tuple[str, ...]],
    ) -> None:
        self._address = address
        self._ports = ports
        self._resolve = resolve

    def probe(self, raw: Mapping[str, Any] | None) -> Probe | None:
        if (handler := self.handler(raw)) is None or raw is None:
            return None
        return Probe(
            handler,
            period=float(raw.get("periodSeconds", 10)),
            timeout=float(raw.get("timeoutSeconds", 1)),
            initial_delay=float(raw.get("initialDelaySeconds", 0)),
            failure_threshold=int(raw.get("failureThreshold", 3)),
            success_threshold=int(raw.get("successThreshold", 1)),
        )

    def handler(self, raw: Mapping[str, Any] | None) -> Handler | None:
        if raw is None:
            return None
        if (http := raw.get("httpGet")) is not None:
            return HttpGet(
                self._host(http),
                self._port(http),
                http.get("path", "/"),
                http.get("scheme", "HTTP").lower(),
                tuple((h["name"], h["value"]) for h in http.get("httpHeaders") or ()),
            )
        if (tcp := raw.get("tcpSocket")) is not None:
            return TcpSocket(self._host(tcp), self._port(tcp))
        if (sleep := raw.get("sleep")) is not None:
            return Sleep(float(sleep["seconds"]))
        return Exec(self._resolve(raw["exec"]["command"]))

    def _host(self, raw: Mapping[str, Any]) -> str:
        """The host to connect to; localhost and 127.0.0.1 stand for the pod's own address."""
        host = str(raw.get("host") or self._address)
        if host == "localhost":
            return self._address
        if re.fullmatch(r"[\d.]+", host) and IPv4Address(host) == IPv4Address("127.0.0.1"):
            return self._address
        return host

    def _port(self, raw: Mapping[str, Any]) -> int:
        port = raw["port"]
        # A probe may name its port, as the container's `ports` do.
        if isinstance(port, str) and port not in self._ports:
            raise ValueError(f"no port of the container is named {port!r}")
        return self._ports[port] if isinstance(port, str) else int(port)


def _extended_resources(resources: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """GPUs and other extended resources, whose names have a slash; cpu and memory are ignored."""
    limits = {**(resources.get("requests") or {}), **(resources.get("limits") or {})}
    return {name: int(count) for name, count in limits.items() if "/" in name}
