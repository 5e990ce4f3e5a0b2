"""ClusterIPs of endpoints whose Services were removed, for those that are created again. No I/O.

In memory: an operator that restarts within the grace time has forgotten them, and Kubernetes then
chooses another. Nothing in the cluster can tell it, since all objects of a pool go with the pool.
"""

from typing import Final

from tandem_contract import labels

from ..observed import Body, EndpointKey

ADDRESS_GRACE: Final = 600.0
"""Seconds in which an endpoint gets the ClusterIP again. A GitOps tool that replaces a pool takes
minutes at most; clients that keep an address for longer are rare."""
_RELEASE: Final = 5.0
"""Seconds after which a refused address counts as another Service's: the API server releases
it only after the Service is gone."""


class LeftAddresses:
    """The ClusterIP of each endpoint whose Service was removed lately."""

    def __init__(self) -> None:
        self._left: dict[EndpointKey, tuple[str, float]] = {}
        """With the Unix seconds until which it may be used again."""

    def add(self, child: Body, now: float) -> None:
        """An object of an endpoint is removed."""
        metadata = child["metadata"]
        key = EndpointKey(metadata["namespace"], metadata["labels"][labels.ENDPOINT])
        if address := client_address(child, key):
            self._left = {k: v for k, v in self._left.items() if now < v[1]}
            self._left[key] = address, now + ADDRESS_GRACE

    def get(self, key: EndpointKey, now: float) -> str:
        """The address that an endpoint may have again; "" when there is none."""
        address, until = self._left.get(key, ("", 0.0))
        return address if now < until else ""

    def refused(self, key: EndpointKey, now: float) -> None:
        """The API server does not give the address."""
        if key in self._left:
            address, until = self._left[key]
            self._left[key] = address, min(until, now + _RELEASE)


def client_address(child: Body, key: EndpointKey) -> str:
    """The ClusterIP if an object is the endpoint's Service for clients, else ""."""
    is_service = child["kind"] == "Service" and child["metadata"]["name"] == key.name
    return str(child["spec"].get("clusterIP", "")) if is_service else ""
