"""Parts of the custom resources' spec as types: how pods are checked, how KV moves between them.

`spec` has the others. For a check that is None, `pods.probes` has the default, or the EPP.
"""

from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from tandem_contract.connectors import ConnectorName
from tandem_contract.durations import Seconds


class _Section(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """As in `spec`, which imports this module."""


class ReadinessChecks(_Section, frozen=True, kw_only=True):
    interval: Seconds | None = None
    timeout: Seconds | None = None
    unhealthy_threshold: int | None = None
    healthy_threshold: int | None = None


class LivenessChecks(_Section, frozen=True, kw_only=True):
    interval: Seconds | None = None
    timeout: Seconds | None = None
    unhealthy_threshold: int | None = None


class HealthChecks(_Section, frozen=True, kw_only=True):
    path: str | None = None
    startup_timeout: Seconds | None = None
    readiness: ReadinessChecks = ReadinessChecks()
    liveness: LivenessChecks = LivenessChecks()


class EppChecks(ReadinessChecks, frozen=True, kw_only=True):
    path: str | None = None


class Storage(_Section, frozen=True, kw_only=True):
    endpoint: str
    protocol: str | None = None
    region: str | None = None
    kv_namespace: str | None = None
    credentials_secret_ref: dict[str, str] | None = None
    capacity: int | str | None = None
    """Bytes, as a Kubernetes quantity."""
    max_age: Seconds | None = None
    image: str | None = None
    """Of the init container that brings vLLM's connector; None: the installation's."""


class Rdma(_Section, frozen=True, kw_only=True):
    """RDMA devices of one pod."""

    resource: str
    count: int


class ChainedConnector(_Section, frozen=True, kw_only=True):
    connector: str
    extra_config: dict[str, Any] = {}


def handoff_connector(names: Sequence[str]) -> str:
    """The connector of a chain that moves KV between the pods of a set.

    The first that is neither offloading nor storage: beside another connector, these only keep KV.
    """
    return min(
        names, key=lambda name: (name == ConnectorName.OFFLOADING, name == ConnectorName.STORAGE)
    )


class PortRange(_Section, frozen=True, kw_only=True):
    """TCP ports, both ends included."""

    first: int
    last: int


class Transfer(_Section, frozen=True, kw_only=True):
    connector: str
    backends: tuple[str, ...] = ()
    buffer_device: str | None = None
    side_channel_port: int
    data_ports: PortRange | None = None
    """Where UCX takes connections; None for engines without UCX."""
    lease_duration: Seconds
    rdma: Rdma | None = None
    require_rdma: bool = False
    storage: Storage | None = None
    extra_config: dict[str, Any] = {}
    """Settings of `connector`, unless it is a chain."""
    connectors: tuple[ChainedConnector, ...] = ()
    load_failure_policy: Literal["recompute", "fail"]

    @property
    def links(self) -> tuple[ChainedConnector, ...]:
        """The connectors that move KV: those of `connectors`, or `connector` alone."""
        alone = ChainedConnector(connector=self.connector, extra_config=self.extra_config)
        return self.connectors or (alone,)

    @property
    def connector_names(self) -> tuple[str, ...]:
        """Names of the connectors that move KV."""
        return tuple(link.connector for link in self.links)

    @property
    def handoff_connector(self) -> str:
        """The connector that moves KV between the pods of a set."""
        return handoff_connector(self.connector_names)

    @property
    def offloading(self) -> ChainedConnector | None:
        """The connector that keeps KV in host memory as well; None without."""
        return next(
            (link for link in self.links if link.connector == ConnectorName.OFFLOADING), None
        )
