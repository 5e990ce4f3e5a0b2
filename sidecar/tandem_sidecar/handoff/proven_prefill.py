"""A pod with a sidecar computes the prefill leg of another pod's hand-off: a unified pod, or a pod
that drains, whose engine has nearly all of the KV in its prefix cache.

The sidecar of the decode pod proves with a plan key that the leg is its own (`prefill_proof`). The
sidecar here verifies the proof (`security.route.proven_leg`) and lets such a leg keep the transfer
parameters, which it removes from every request of a client.
"""

import time
from typing import Final

from tandem_contract import headers
from tandem_contract.plan import CLOCK_SECONDS, Target, prove_prefill
from tandem_http1.messages import Headers

from ..observability.record import Phase
from ..security.route import Candidate
from .context import GenerationRequest
from .passthrough import Passthrough
from .reply import encode_headers

_PROOF: Final = headers.PREFILL_PROOF.encode()
_TIMING: Final = headers.TIMING.encode()


def prefill_proof(generation: GenerationRequest, candidate: Candidate, attempt_id: str) -> Headers:
    """The header that lets a leg pass the pod's sidecar; none for pods without one."""
    if not candidate.asks_for_proof or not generation.keys:
        return []
    proof = prove_prefill(
        Target(candidate.name, str(candidate.address), candidate.rank),
        attempt_id,
        generation.keys,
        now=time.time(),
        seconds=generation.prefill_timeout + CLOCK_SECONDS,
        left_plan=generation.route.left_plan if candidate is generation.route.left else "",
    )
    return [(_PROOF, proof.encode())]


class ProvenPrefill(Passthrough):
    """The prefill leg of another pod's hand-off, with a proof that this pod may compute it.

    The other pod's sidecar made its body, so its transfer parameters stay; the answer, which names
    the KV, goes back as it is. That sidecar counts the request, also when this leg fails.
    """

    phase = Phase.PREFILL
    computes_prompt = True

    def attempt_id(self) -> str:
        """That of the other sidecar: connectors match both legs by it."""
        return self.record.request_id

    def header_lines(self) -> bytes:
        """The engine's own times, which the other sidecar reads."""
        timing = self._head.value(_TIMING) if self.leg.status is not None else b""
        return super().header_lines() + encode_headers({headers.TIMING: timing.decode("latin-1")})
