"""Which external store of KV each pod reads and writes, and what loads from each store take.

What a store has belongs to the store and not to a pod: any pod of it can load it, also one that
started later. Two pods have the same store if they have the same endpoint and namespace, or none
that is configured here, and the same models and compat hash: pods of the operator have their
store's settings in that hash.
"""

from collections.abc import Iterable

from tandem_contract.config import Backend, ExternalStorage
from tandem_planner.storage import STORAGE_PRIOR
from tandem_planner.transfer import TransferFit

from .pods import Pod


class Stores:
    """The stores of a fleet."""

    def __init__(self) -> None:
        self.is_enabled = False
        """Whether the choice of a pod counts what is in stores."""
        self.default: ExternalStorage | None = None
        """Of backends that name none."""
        self._fits: dict[str, TransferFit] = {}

    def assign(self, pods: Iterable[Pod]) -> None:
        """Set the store of each pod, and forget what was learned of stores without pods."""
        former, self._fits = self._fits, {}
        for pod in pods:
            pod.store = store_name(pod.backend, self.default) if self.is_enabled else None
            pod.estimates.loads = None
            if pod.store is not None:
                fit = former.get(pod.store) or TransferFit(STORAGE_PRIOR)
                pod.estimates.loads = self._fits.setdefault(pod.store, fit)


def store_name(backend: Backend, default: ExternalStorage | None) -> str | None:
    """What tells the store of `backend` from others; it holds no credentials. None: nothing tells
    which store it has."""
    storage = backend.external_storage or default
    if storage is None and backend.compat is None:
        return None
    endpoint = storage.endpoint.rstrip("/") if storage is not None else ""
    namespace = storage.kv_namespace.strip("/") if storage is not None else ""
    return repr((endpoint, namespace, backend.compat, sorted(backend.models)))
