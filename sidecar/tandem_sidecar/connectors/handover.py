"""What passes between a hand-off and its connector.

    prefill(kind, body, attempt) -> bytes          every connector
    handover(attempt, answer) -> Handover          the prefill's 2xx; raises ParamsUnusable
    decode(kind, body, handover) -> bytes
    release(kind, body, handover) -> Outgoing | None

    together: bool                                 the legs run at once
    light_release: bool                            a release is a word, and no request that is run
    waits_without_end: bool                        decode waits for ever for KV that never comes
    inquiry(attempt) -> Inquiry | None             what the prefill pod must be asked first
    learned(attempt, answer) -> None               its answer's body; raises ParamsUnusable
    expected(attempt) -> Handover                  when `together`, before the prefill answered
    forget(prefill) -> None                        what was learned of a pod that failed is void

When `together`, the prefill's 2xx is still read by `handover`: it raises ParamsUnusable where the
decode leg waits in vain, and only then is `cached_tokens` known.
"""

import msgspec

from tandem_contract.commandline import HostPort


class Attempt(msgspec.Struct, frozen=True, gc=False):
    """One try at a hand-off with one prefill pod."""

    engine_id: str
    """`X-Request-Id` of both legs and of the release; no other attempt has it."""
    prefill: HostPort


class Handover(msgspec.Struct, frozen=True, gc=False):
    """What a decode engine finds a prompt's KV by."""

    params: bytes
    """Its `kv_transfer_params`, a JSON object ready encoded."""
    cached_tokens: int | None = None
    """Prompt tokens the prefill found cached, for a usage that the decode engine would get wrong;
    None: it gets it right."""
    prompt_token_ids: bytes = b""
    """The prompt as the prefill tokenized it, a JSON list; empty: decode tokenizes it itself."""
    engine_id: str = ""
    """The attempt's, for a connector that says it in the body too."""


class Outgoing(msgspec.Struct, frozen=True, gc=False):
    """A request of the connector's own to the decode engine, under the attempt's engine id."""

    target: bytes
    body: bytes
    expected: int
    """The status that says it did its work."""


class Inquiry(msgspec.Struct, frozen=True, gc=False):
    """A GET that a prefill pod is asked before its first hand-off; its answer is `learned`."""

    address: HostPort
    target: bytes
