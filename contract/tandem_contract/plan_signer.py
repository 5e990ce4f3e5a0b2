"""Signs many plans with the same keys, one for each request. `plan` says what they are."""

from collections.abc import Mapping

from .plan import Plan, encode_plan, plan_head, signing_key
from .plan_mac import signed


class PlanSigner:
    """Signs plans with a set of keys."""

    def __init__(self, keys: Mapping[str, bytes]) -> None:
        """`keys` must not change."""
        self._keys = keys
        self._second = -1
        """The Unix second for which `_head` and `_secret` hold: ids are compared by the second."""
        self._head = self._secret = b""

    def sign(self, plan: Plan, now: float) -> str:
        """The header value, signed with the key that signs at `now` (Unix seconds).

        Raises ValueError without any key.
        """
        if int(now) != self._second:
            key_id = signing_key(self._keys, now)
            self._head, self._secret = plan_head(key_id), self._keys[key_id]
            self._second = int(now)
        return signed(self._head, encode_plan(plan), self._secret)
