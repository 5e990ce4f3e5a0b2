"""GET /v1/models where backends list different models: no one of them knows all. Pure.

The rest of the fleet's questions go to a backend; this one is answered here, in OpenAI's shape.
"""

from collections.abc import Sequence
from typing import Final

import msgspec

from .backends.pods import Pod
from .ext_proc.messages import HttpRequest, Immediate

_PATH: Final = "/v1/models"
_OWNER: Final = "tandem"


def asks_for_models(request: HttpRequest) -> bool:
    """Whether `request` is for the list of models."""
    return request.method == "GET" and request.path.partition("?")[0] == _PATH


def list_of_models(pods: Sequence[Pod], now: float) -> Immediate | None:
    """The models that `pods` list together; None where one of them has to be asked: there is no
    pod, or one that does not say what it serves. `now` is Unix seconds."""
    if not pods or not all(pod.backend.models for pod in pods):
        return None
    names = sorted({name for pod in pods for name in pod.backend.models})
    models = [
        {"id": name, "object": "model", "created": int(now), "owned_by": _OWNER} for name in names
    ]
    return Immediate(200, msgspec.json.encode({"object": "list", "data": models}))
