"""Several connectors in one engine (vLLM's MultiConnector), led by NIXL.

The first connector of the chain that has tokens for a request loads them, and a prefill's answer
joins what each of them says. So with NIXL in front the legs are NIXL's, and what the others add to
the object travels with it.
"""

from typing import Final

from .nixl import Nixl

NAME: Final = "multi"


class Multi(Nixl):
    """The connector; holds no state."""
