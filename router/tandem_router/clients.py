"""Who a request is from, by its API key: the router's counterpart of Envoy's api_key_auth."""

from typing import Final

from msgspec.structs import replace

from tandem_contract.api_keys import ApiKeys
from tandem_http1.messages import Request

REFUSED: Final = "Client authentication failed."
"""As Envoy says it."""
_AUTHORIZATION: Final = b"authorization"
_BEARER: Final = b"Bearer "
_X_API_KEY: Final = b"x-api-key"
_KEYS: Final = frozenset({_AUTHORIZATION, _X_API_KEY})
"""Headers with keys, which neither engines nor their logs need."""


def client_of(request: Request, keys: ApiKeys) -> str | None:
    """The client whose key `request` has, in Authorization after `Bearer`, or in x-api-key; None:
    it has no key, an unknown one, or such a header twice."""
    try:
        bearer, own = request.single(_AUTHORIZATION), request.single(_X_API_KEY)
    except ValueError:
        return None
    if bearer is None:
        return None if own is None else keys.client_of(own)
    return keys.client_of(bearer[len(_BEARER) :]) if bearer.startswith(_BEARER) else None


def without_keys(request: Request) -> Request:
    """The request without its headers with keys."""
    headers = [pair for pair in request.headers if pair[0] not in _KEYS]
    values = {name: value for name, value in request.values.items() if name not in _KEYS}
    return replace(request, headers=headers, values=values)
