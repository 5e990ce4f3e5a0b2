"""The EPP's own answers: errors in the API's form, counted, with llm-d's reason if it has one; and
GET /v1/models when backends list different models, because no single backend knows all of them.
"""

import logging
from collections.abc import Sequence
from typing import Final

import msgspec

from tandem_contract import body_coding, endpoints
from tandem_contract import headers as wire
from tandem_contract.api_grammar import error_body
from tandem_contract.prompt_length import TokenSizes, longest_length, over_length, too_long

from ..backends.fleet import Fleet
from ..backends.pods import Pod
from ..exchange import HttpRequest, NotPlaced, Reply
from ..metrics.counters import Metrics
from ..request.body_fields import BadBody
from ..request.inference import InferenceRequest

_DROPPED: Final = {
    "no_backend": "rejected-no-endpoints",
    "no_prefill_backend": "rejected-no-endpoints",
    "model_gone": "rejected-no-endpoints",
    "memory_full": "rejected-saturated",
    "fault": "rejected-internal",
    "flow_full": "rejected-saturated",
    "flow_shed": "rejected-saturated",
    "flow_displaced": "evicted-priority",
    "flow_expired": "rejected-ttl-expired",
    "flow_stopping": "rejected-shutting-down",
}
"""Reason → value of REQUEST_DROPPED_REASON. The other reasons are the client's fault, for which
llm-d-router sends none."""
_MODELS_SHOWN: Final = 8
"""Model names in the answer to a request for an unknown model."""
_log: Final = logging.getLogger(__name__)


class Refusals:
    """Makes the error responses."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def error(
        self,
        request: HttpRequest | None,
        status: int,
        reason: str,
        message: str,
        *,
        param: str | None = None,
        retry_after: int = 1,
    ) -> NotPlaced:
        """An error response in the form of the request's API, counted. `retry_after`: seconds, for
        errors that are worth another try."""
        self._metrics.decisions.child("refused", reason).inc()
        _log.debug("refused a request: %d %s", status, reason)
        headers = [("content-type", "application/json")]
        if status in (429, 503):
            headers.append((wire.RETRY_AFTER, str(retry_after)))
        if status == body_coding.REFUSED_STATUS:
            headers.append(body_coding.ACCEPTED)
        if (dropped := _DROPPED.get(reason)) is not None:
            headers.append((wire.REQUEST_DROPPED_REASON, dropped))
        path = request.path if request is not None else ""
        body = error_body(path, status, message, param=param)
        return NotPlaced(Reply(status, body, tuple(headers)), reason)


def check_length(request: InferenceRequest | None, fleet: Fleet, sizes: TokenSizes) -> None:
    """Raises BadBody for a prompt that is too long for every pod that may get it. `sizes`: what no
    token of the model exceeds."""
    if request is None or (request.exact_tokens is None and not request.text.certain):
        return
    longest = longest_length(pod.max_model_len for pod in fleet.ready_pods(request.model))
    if longest is None:
        return
    if (exact := request.exact_tokens) is not None and exact > longest:
        raise BadBody(too_long(longest, f"{exact} tokens"))
    if (problem := over_length(request.text, longest, sizes)) is not None:
        raise BadBody(problem)


def unknown_model(model: str, names: Sequence[str]) -> str:
    """The message for a model that is none of `names`."""
    shown = ", ".join(f"`{name}`" for name in names[:_MODELS_SHOWN])
    more = f" and {len(names) - _MODELS_SHOWN} more" if len(names) > _MODELS_SHOWN else ""
    return f"The model `{model}` does not exist. This endpoint serves {shown}{more}."


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
