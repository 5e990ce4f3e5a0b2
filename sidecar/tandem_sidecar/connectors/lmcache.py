"""LMCache (vLLM's LMCacheConnectorV1 and LMCacheMPConnector): KV moves through a shared store.

1. Prefill leg: the client's body capped to one token. The prefill engine stores the KV of the
   prompt in chunks, each under a hash of all tokens up to its end.
2. Decode leg, after the prefill's answer: the client's body, unchanged. The decode engine looks
   the prompt up in the store, loads the chunks that it finds and computes the rest.

No request names the KV, so there is nothing to release. A prefill that fails, or whose chunks are
not stored yet, costs time and no answer, because the store lists a chunk only when it is complete.

LMCache's own P/D mode (`disagg_spec`, from engine to engine) is not used. Its receiver lists a
chunk before the bytes arrive, and its sender tells only one address, fixed when it starts, that
they have arrived: a sidecar on each decode pod cannot know when a decode leg reads the right KV.
"""

from tandem_contract.request_kinds import RequestKind

from ..bodies.edit import cap_to_one_token
from ..bodies.parse import Body
from ..bodies.usage import read_cached_tokens
from .protocol import ConnectorOptions, HandoffAttempt, KvHold, ReleaseRequest, read_answer


class LmCache:
    """The connector of both of vLLM's classes. It holds no state."""

    release_is_notification = True
    decode_may_wait_forever = False

    def __init__(self, _options: ConnectorOptions | None = None) -> None:
        """No option applies."""

    def prefill_body(self, kind: RequestKind, body: Body, _attempt: HandoffAttempt) -> bytes:
        return cap_to_one_token(kind, body, {})

    def kv_hold(self, attempt: HandoffAttempt, answer: bytes) -> KvHold:
        read_answer(answer)
        # The decode engine counts all tokens that it loaded as cached.
        cached = read_cached_tokens(answer)
        return KvHold(b"", cached_tokens=cached, attempt_id=attempt.attempt_id)

    def decode_body(self, _kind: RequestKind, body: Body, _kv_hold: KvHold) -> bytes:
        return body.data

    def release_request(
        self, _kind: RequestKind, _body: Body, _kv_hold: KvHold
    ) -> ReleaseRequest | None:
        return None
