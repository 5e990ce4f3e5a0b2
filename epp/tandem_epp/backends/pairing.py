"""Which pods may serve one request together, by role, model and KV layout, and how close they are.
Pure."""

from collections.abc import Iterable, Mapping

from tandem_contract.config import Backend
from tandem_contract.fabric_classes import FabricClass
from tandem_contract.paths import Role
from tandem_planner.fabrics import Place, fabric_class

from .pods import Pod


def can_prefill_for(pod: Pod, decode: Pod) -> bool:
    """Whether role and model allow `pod` to prefill for `decode`; the KV layout is not compared.

    A pod never prefills for itself, nor for a pod of another model. For two unified pods see
    `are_alike_unified`.
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


def are_alike_unified(pod: Pod, decode: Pod) -> bool:
    """Whether both are unified pods with the same KV compat hash and a model in common, or the same
    one.

    One may prefill for the other where the cost says that it pays. They are no pair of
    `can_prefill_for`: two engines that each do both phases are not disaggregated, so a request that
    one of them serves alone is not a fallback.
    """
    roles = {pod.backend.role, decode.backend.role}
    return roles == {Role.UNIFIED} and is_kv_compatible(pod, decode)


def pairing_key(decode: Pod) -> object:
    """All of a decode pod that these functions compare: pods with equal keys have the same
    partners."""
    backend = decode.backend
    return (backend.role, backend.compat, backend.models)


def known_fabric(pod: Pod, decode: Pod) -> FabricClass | None:
    """The fabric class of a pair; None if it is not known where one of both runs."""
    if Place() in (pod.place, decode.place):
        return None
    return fabric_class(pod.place, decode.place)


def domains_of_nodes(backends: Iterable[Backend]) -> Mapping[str, str]:
    """Node → its domain, as any of its backends tells; the first by name if they disagree."""
    told = {
        (backend.node, backend.domain) for backend in backends if backend.node and backend.domain
    }
    return dict(sorted(told, reverse=True))


def place_of(backend: Backend, domains: Mapping[str, str]) -> Place:
    """Where a backend runs; `domains` is what `domains_of_nodes` returns. A backend that tells no
    domain has that of its node, so pods of one node are in one domain."""
    # An empty name, as a template may leave it, tells nothing.
    domain = domains.get(backend.node or "", backend.domain)
    return Place(backend.node or None, domain or None)


def _share_a_model(pod: Pod, decode: Pod) -> bool:
    # No list of models means that the backend serves any.
    first, second = pod.backend.models, decode.backend.models
    return first == second or not first or not second or not set(first).isdisjoint(second)
