"""Events about pools: what `kubectl describe` shows. Sent on transitions, never awaited by a loop's
decision: one that cannot be sent is logged and forgotten."""

import logging
import os
import time
from datetime import UTC, datetime
from typing import Final, Literal

from tandem_kube.client import Api
from tandem_kube.errors import ApiError
from tandem_kube.resources import EVENTS, Object

from ..observed import PoolResource

CONTROLLER: Final = "tandem.dev/operator"
_NOTE: Final = 1024
"""Characters the API server takes."""

log = logging.getLogger(__name__)


async def send_event(
    api: Api, pool: PoolResource, kind: Literal["Normal", "Warning"], reason: str, note: str
) -> None:
    """Say that something about `pool` has changed."""
    name = f"{pool.key.name[:200]}.{time.time_ns():x}"
    body: Object = {
        "apiVersion": EVENTS.api_version,
        "kind": "Event",
        "metadata": {"name": name, "namespace": pool.key.namespace},
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": CONTROLLER,
        "reportingInstance": os.uname().nodename[:128],
        "type": kind,
        "reason": reason,
        "action": "Reconcile",
        "note": note if len(note) <= _NOTE else note[: _NOTE - 1] + "…",
        "regarding": {
            "apiVersion": pool.body["apiVersion"],
            "kind": pool.key.kind,
            "namespace": pool.key.namespace,
            "name": pool.key.name,
            "uid": pool.uid,
        },
    }
    try:
        await api.create(EVENTS, body)
    except ApiError as err:
        log.warning("cannot send the event %s about %s: %s", reason, pool.key, err)
