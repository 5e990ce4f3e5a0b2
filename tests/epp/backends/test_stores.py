"""Which backends have the same external store."""

from tandem_contract.config import Backend, Credentials, ExternalStorage
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.backends.stores import store_name

STORE = ExternalStorage("http://store:8080", credentials=Credentials("id", "secret-key"))


def _backend(name: str = "a", **fields: object) -> Backend:
    fields = {"models": ("m",), **fields}
    return Backend(name=name, url="http://10.0.0.1:8000", **fields)  # type: ignore[arg-type]


def test_the_store_is_told_by_endpoint_namespace_compat_hash_and_models() -> None:
    same = store_name(_backend(external_storage=STORE), None)
    assert same is not None
    assert same == store_name(_backend("b"), STORE)
    slash = ExternalStorage("http://store:8080/")
    assert same == store_name(_backend(external_storage=slash), STORE)
    others = [
        store_name(_backend(external_storage=ExternalStorage("http://other:8080")), STORE),
        store_name(_backend(external_storage=ExternalStorage(STORE.endpoint, "ns")), STORE),
        store_name(_backend(compat="h"), STORE),
        store_name(_backend(models=("n",)), STORE),
    ]
    assert len({same, *others}) == 5
    assert "secret" not in same


def test_pods_of_the_operator_need_no_configured_store() -> None:
    assert store_name(_backend(compat="h"), None) == store_name(_backend("b", compat="h"), None)
    assert store_name(_backend(), None) is None


def _fleet(*, is_enabled: bool) -> tuple[Fleet, list[Pod]]:
    fleet = Fleet()
    fleet.stores.is_enabled, fleet.stores.default = is_enabled, STORE
    fleet.apply(DiscoveredBackend(_backend(name)) for name in "ab")
    return fleet, list(fleet)


def test_pods_of_one_store_learn_together_and_a_replaced_pod_knows_it() -> None:
    fleet, (first, second) = _fleet(is_enabled=True)
    fit = first.estimates.loads
    assert fit is not None
    assert second.estimates.loads is fit
    fleet.apply([DiscoveredBackend(_backend("c"))])
    (pod,) = fleet
    assert pod.estimates.loads is fit


def test_no_pod_has_a_store_while_storage_offloading_is_off() -> None:
    _, pods = _fleet(is_enabled=False)
    assert [(pod.store, pod.estimates.loads) for pod in pods] == [(None, None)] * 2
