"""GET /v1/models when backends list different models: no single backend knows all of them. Pure.

The EPP answers this one request itself, in OpenAI's format.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from tandem_contract import endpoints

from ..backends.pods import Pod
from ..exchange import HttpRequest, Reply

_OWNER: Final = "tandem"


def is_models_request(request: HttpRequest) -> bool:
    """Whether `request` asks for the list of models."""
    return request.method == "GET" and request.path.partition("?")[0] == endpoints.MODELS


def models_response(pods: Sequence[Pod], now: float) -> Reply | None:
    """All models that `pods` list; `now` is Unix seconds.

    None when a backend must answer instead: there is no pod, or one that lists no models.
    """
    if not pods or not all(pod.backend.models for pod in pods):
        return None
    names = sorted({name for pod in pods for name in pod.backend.models})
    models = [
        {"id": name, "object": "model", "created": int(now), "owned_by": _OWNER} for name in names
    ]
    return Reply(200, msgspec.json.encode({"object": "list", "data": models}))
