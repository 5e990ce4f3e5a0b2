"""What passes between a hand-off and its connector."""

from dataclasses import dataclass

from tandem_contract.commandline import HostPort


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try at a hand-off with one prefill pod."""

    engine_id: str
    """`X-Request-Id` of both legs; no other attempt has it."""
    prefill: HostPort


@dataclass(frozen=True, slots=True)
class Handover:
    """What a decode engine finds a prompt's KV by."""

    params: bytes
    """Its `kv_transfer_params`, a JSON object ready encoded."""
    cached_tokens: int | None = None
    """Prompt tokens the prefill found cached, for a usage that the decode engine would get wrong;
    None: it gets it right."""


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request of the connector's own to the decode engine."""

    target: bytes
    body: bytes
    expected: int
    """The status that says it did its work."""
