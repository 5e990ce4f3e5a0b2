"""The protocols that connectors implement, the types of their arguments and results, and functions
that several connectors call: to read prefill answers, and to pass token ids on to the decode leg.

The package's docstring says what a connector implements. Errors: `ParamsUnusable` (of
`tandem_contract.transfer_params`): the decode engine has to compute the prompt itself.
"""

from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import msgspec
from msgspec import Raw

from tandem_contract.commandline import HostPort
from tandem_contract.concurrent_params import StreamSource
from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import ParamsUnusable

from ..bodies.edit import can_reuse_token_ids
from ..bodies.parse import Body


class HandoffAttempt(msgspec.Struct, frozen=True, gc=False):
    """One attempt to hand a request off, with one prefill pod."""

    attempt_id: str
    """`X-Request-Id` of both legs and of the release, unique to this attempt. vLLM's connectors
    match the legs by it."""
    prefill: HostPort
    source: StreamSource | None = None
    """The prefill engine whose KV the decode engine reads while it is computed; None: afterwards,
    or by a connector of its own kind."""
    transfer_timeout: float = 10.0
    """Seconds for the transfer: `kv_transfer_timeout` of the request's plan or of the settings."""


class KvHold(msgspec.Struct, frozen=True, gc=False):
    """KV that a prefill engine holds until a decode engine reads it or it is released."""

    transfer_params: bytes
    """The decode leg's `kv_transfer_params`: an encoded JSON object."""
    cached_tokens: int | None = None
    """Prompt tokens that the prefill found in its cache, to correct the usage of the decode
    engine's answer; None: that engine reports the count correctly."""
    created_tokens: int | None = None
    """Prompt tokens that the prefill wrote to its cache, to correct the same usage; None: its API
    does not count them."""
    prompt_token_ids: bytes = b""
    """The prompt's token ids from the prefill, an encoded JSON list; empty: decode tokenizes."""
    attempt_id: str = ""
    """The attempt's, for connectors that repeat it in the decode leg's body."""
    is_unexpected: bool = False
    """A decode leg that was sent before the prefill's answer cannot read this KV: another engine
    than the expected one computed it."""


class ReleaseRequest(msgspec.Struct, frozen=True, gc=False):
    """A POST to the decode engine that makes the prefill engine free the KV.

    It carries the attempt's id as its request id.
    """

    target: bytes
    body: bytes
    expected_status: int
    """The status of a successful release."""


class PeerQuery(msgspec.Struct, frozen=True, gc=False):
    """A GET to a prefill pod that precedes its first hand-off."""

    address: HostPort
    target: bytes


class Connector(Protocol):
    """The core of a connector: what the two legs of a hand-off contain."""

    @property
    def release_is_notification(self) -> bool:
        """Whether a release only notifies the producer; otherwise the decode engine runs it.

        A notification costs less than the prefill, and it does no harm after a decode leg was sent.
        """

    @property
    def decode_may_wait_forever(self) -> bool:
        """Whether a decode engine waits for KV that never arrives until its client disconnects."""

    def prefill_body(self, kind: RequestKind, body: Body, attempt: HandoffAttempt) -> bytes:
        """Body of the prefill leg: one token, and the parameters that make the engine hold KV."""

    def kv_hold(self, attempt: HandoffAttempt, answer: bytes) -> KvHold:
        """The KV that the prefill's 2xx answer, its body, makes readable. Raises ParamsUnusable."""

    def decode_body(self, kind: RequestKind, body: Body, kv_hold: KvHold) -> bytes:
        """Body of the decode leg, which reads the KV."""

    def release_request(
        self, kind: RequestKind, body: Body, kv_hold: KvHold
    ) -> ReleaseRequest | None:
        """The request that frees KV which will not be read; None: the engines free it alone."""


@runtime_checkable
class ConcurrentLegs(Protocol):
    """Optional: the decode leg is sent with the prefill leg, without waiting for its answer."""

    def expected_kv_hold(self, attempt: HandoffAttempt) -> KvHold | None:
        """The KV that the prefill leg, which is being sent, will hold; None: this attempt's decode
        leg has to wait for the answer. Raises ParamsUnusable."""

    def stream_source(self, prefill: HostPort) -> StreamSource | None:
        """The pod's engine, if it is known to serve KV while it is computed."""

    def forget_source(self, prefill: HostPort) -> None:
        """A hand-off with the pod failed: what is known of its engine may be outdated."""


@runtime_checkable
class PeerDiscovery(Protocol):
    """Optional: the sidecar queries a prefill pod before the first hand-off with it."""

    def peer_query(self, attempt: HandoffAttempt) -> PeerQuery | None:
        """The query to send first; None: the answer is known."""

    def record_peer(self, attempt: HandoffAttempt, answer: bytes) -> None:
        """Keep the answer, the body of a 2xx. Raises ParamsUnusable."""

    def forget_peer(self, prefill: HostPort) -> None:
        """The pod failed: query it again before its next hand-off."""


class ResolvedConnector(msgspec.Struct, frozen=True):
    """A connector and the optional protocols that it implements, None for the others."""

    core: Connector
    concurrent: ConcurrentLegs | None
    discovery: PeerDiscovery | None


def resolve(connector: Connector) -> ResolvedConnector:
    """Find the optional protocols of `connector`, once, so that no request has to check them."""
    return ResolvedConnector(
        connector,
        connector if isinstance(connector, ConcurrentLegs) else None,
        connector if isinstance(connector, PeerDiscovery) else None,
    )


@dataclass(slots=True)
class ConnectorOptions:
    """The command line's connector options. Each connector uses those that apply to it."""

    tokenize_once: bool = True
    """Reuse the prefill's token ids in the decode leg. A reload may change it; a hand-off in flight
    uses token ids if its prefill returned some."""
    peer_port: int | None = None
    """Port of the prefill pod's bootstrap server or peer-to-peer tier; None: vLLM's default."""


_NULL: Final = Raw(b"null")


class PrefillAnswer(msgspec.Struct):
    """The fields of a prefill's answer that a hand-off needs; the others are skipped."""

    kv_transfer_params: Raw = _NULL
    prompt_token_ids: Raw = _NULL


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Ending(msgspec.Struct):
    """Why an answer ended, in the field that its API has: choices, stop_reason or status."""

    choices: list[_Choice] = []
    stop_reason: str | int | None = None
    status: str | int | None = None


_answer: Final = msgspec.json.Decoder(PrefillAnswer)
_ending: Final = msgspec.json.Decoder(_Ending)
# Completions and chat say `length`, messages `max_tokens`, responses `incomplete`; a field that an
# API lacks is None.
_BY_LENGTH: Final = frozenset({None, "length", "max_tokens", "incomplete"})


def read_answer(answer: bytes) -> PrefillAnswer:
    """Decode a prefill's answer. Raises ParamsUnusable if it is not a JSON object."""
    try:
        return _answer.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ParamsUnusable("the answer is not a JSON object") from err


def token_ids_request(options: ConnectorOptions, kind: RequestKind, body: Body) -> dict[str, Any]:
    """Members of a prefill leg that ask for the token ids of its prompt; empty if the decode engine
    renders the messages itself."""
    if options.tokenize_once and kind is RequestKind.CHAT and can_reuse_token_ids(body.members):
        return {"return_token_ids": True}
    return {}


def token_ids_of(fields: PrefillAnswer) -> bytes:
    """The token ids, which an answer contains only if the prefill leg asked for them."""
    ids = bytes(fields.prompt_token_ids)
    return ids if ids[:1] == b"[" and ids[1:].lstrip() != b"]" else b""


def check_ended_by_length(answer: bytes) -> None:
    """Raise ParamsUnusable if the prefill ended otherwise: the producer then drops its KV."""
    try:
        ending = _ending.decode(answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise ParamsUnusable("the answer is not a JSON object") from err
    reasons = {choice.finish_reason for choice in ending.choices}
    if not reasons | {ending.stop_reason, ending.status} <= _BY_LENGTH:
        raise ParamsUnusable("the prefill ended before its one token, so its KV is not held")
