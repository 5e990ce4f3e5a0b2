"""Events about an object, as `kubectl describe` and `kubectl get events` show them."""

import logging
import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, Final, Literal

from .client import Api
from .errors import ApiError
from .resources import EVENTS, Object

_MAX_NOTE: Final = 1024
"""Characters of `note` that the API server accepts."""

_log: Final = logging.getLogger(__name__)


async def send_event(
    api: Api,
    regarding: Mapping[str, Any],
    kind: Literal["Normal", "Warning"],
    reason: str,
    message: str,
    *,
    controller: str,
) -> None:
    """Create an event about the object `regarding`, in its namespace.

    `reason` is one word in CamelCase, `controller` the name of the reporting controller. A
    `message` over 1,024 characters is cut. Events are informative only, so a call that fails is
    logged and not raised.
    """
    metadata = regarding["metadata"]
    body: Object = {
        "apiVersion": EVENTS.api_version,
        "kind": "Event",
        "metadata": {
            # The time makes the name unique; the prefix is cut to stay within 253 characters.
            "name": f"{metadata['name'][:200]}.{time.time_ns():x}",
            "namespace": metadata["namespace"],
        },
        "eventTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "reportingController": controller,
        # In a cluster the node name is the pod's name. The API server accepts 128 characters.
        "reportingInstance": os.uname().nodename[:128],
        "type": kind,
        "reason": reason,
        "action": "Reconcile",
        "note": message if len(message) <= _MAX_NOTE else message[: _MAX_NOTE - 1] + "…",
        "regarding": {
            "apiVersion": regarding["apiVersion"],
            "kind": regarding["kind"],
            "namespace": metadata["namespace"],
            "name": metadata["name"],
            "uid": metadata["uid"],
        },
    }
    try:
        await api.create(EVENTS, body)
    except ApiError as err:
        _log.warning(
            "cannot create the event %s about %s %s: %s",
            reason,
            regarding["kind"],
            metadata["name"],
            err,
        )
