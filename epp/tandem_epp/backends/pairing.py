"""Which pods may serve one request together: role, model and KV layout. Pure."""

from tandem_contract.paths import Role

from .pods import Pod


def can_prefill_for(pod: Pod, decode: Pod) -> bool:
    """Whether role and model allow `pod` to prefill for `decode`; the KV layout is not compared.

    A pod never prefills for itself. A unified pod does not prefill for another unified pod: two
    engines that each do both phases are not disaggregated. Nor does a pod of another model.
    """
    roles = {pod.backend.role, decode.backend.role}
    return (
        pod is not decode
        and pod.backend.role.serves(Role.PREFILL)
        and roles != {Role.UNIFIED}
        and _share_a_model(pod, decode)
    )


def can_hand_off(pod: Pod, decode: Pod) -> bool:
    """Whether `pod` can prefill for `decode` and `decode` can read its KV."""
    return can_prefill_for(pod, decode) and is_kv_compatible(pod, decode)


def is_kv_compatible(pod: Pod, decode: Pod) -> bool:
    """Whether both have the same KV compat hash (or none) and a model in common."""
    return pod.backend.compat == decode.backend.compat and _share_a_model(pod, decode)


def pairing_key(decode: Pod) -> object:
    """All of a decode pod that these functions compare: pods with equal keys have the same
    partners."""
    backend = decode.backend
    return (backend.role, backend.compat, backend.models)


def _share_a_model(pod: Pod, decode: Pod) -> bool:
    # No list of models means that the backend serves any.
    first, second = pod.backend.models, decode.backend.models
    return first == second or not first or not second or not set(first).isdisjoint(second)
