"""How pods are checked, as types: parts of the custom resources' spec.

None leaves the default to `pods.probes`, and of `EppChecks` to the EPP.
"""

import msgspec

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
