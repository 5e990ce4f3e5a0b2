"""Which backend a request about a stored response must go to. Pure."""

from tandem_contract.response_ids import has_tag_of, response_id_in

from ..backends.pods import Pod
from ..choice.scheduler import in_subset
from ..exchange import HttpRequest
from ..request.inference import InferenceRequest


def subset_storing_response(
    request: HttpRequest, parsed: InferenceRequest | None, ready: tuple[Pod, ...]
) -> frozenset[str] | None:
    """Addresses of the backends that may serve `request`: the one of `ready` that stores the
    response which the request is about, else all that the gateway's hint allows. None: any."""
    response_id = parsed.previous_response if parsed is not None else response_id_in(request.path)
    if response_id:
        for pod in in_subset(ready, request.subset):
            # Ranks of one engine share its store, and a sidecar without plans knows no rank.
            names = (pod.name, pod.backend.name)
            if pod.address and any(has_tag_of(response_id, name) for name in names):
                return frozenset((pod.address,))
    return request.subset
