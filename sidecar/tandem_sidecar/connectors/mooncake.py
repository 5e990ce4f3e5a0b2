"""Mooncake: both legs at once, matched by an id; decode asks the producer for the blocks.

0. inquiry: the prefill pod's registry says its engine id, which holds until it restarts; nobody
   tells of a restart under the same address, so it is asked again now and then
1. prefill leg: the client's body capped to one token, and `transfer_id`
2. decode leg: the client's body, the same `transfer_id`, the registry and the engine id
3. release: the refused completion of pull, with the decode leg's object

The producer keeps what finished by length and drops the rest at once, while decode goes on asking
until VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT; so an answer that ended otherwise is no hand-over.
"""

import time
from collections.abc import Callable
from typing import Final

import msgspec

from tandem_contract import concurrent_params, ports, transfer_params
from tandem_contract.commandline import HostPort
from tandem_contract.transfer_params import ParamsUnusable

from ..bodies.edit import with_member
from ..bodies.kinds import Kind, capped
from ..bodies.parse import Body
from ..bodies.usage import cached_tokens
from .answers import check_ended_by_length
from .handover import Attempt, Handover, Inquiry, Outgoing
from .nixl import refused

NAME: Final = "mooncake"

_HOLDS: Final = 10.0
"""Seconds an engine id is believed. Too long: after a restart, so long decode computes prompts
again that were computed; too short: an inquiry before every prefill."""

_ranks: Final = msgspec.json.Decoder(dict[str, concurrent_params.MooncakeRank])


class Mooncake:
    """The connector; remembers the engine id of each prefill pod for a while."""

    together = True
    light_release = True
    waits_without_end = False

    def __init__(
        self,
        *,
        bootstrap_port: int = ports.MOONCAKE_BOOTSTRAP,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = bootstrap_port
        self._clock = clock
        self._engines: dict[HostPort, tuple[str, float]] = {}

    def prefill(self, kind: Kind, body: Body, attempt: Attempt) -> bytes:
        """Body of the prefill leg."""
        params = concurrent_params.MooncakePrefill(attempt.engine_id)
        return capped(kind, body, {transfer_params.FIELD: params})

    def handover(self, attempt: Attempt, answer: bytes) -> Handover:
        """What was expected, once the prefill is done. Raises ParamsUnusable."""
        check_ended_by_length(answer)
        return Handover(self.expected(attempt).params, cached_tokens=cached_tokens(answer))

    def decode(self, _kind: Kind, body: Body, handover: Handover) -> bytes:
        """Body of the decode leg."""
        return with_member(body, transfer_params.FIELD, handover.params)

    def release(self, _kind: Kind, _body: Body, handover: Handover) -> Outgoing | None:
        """The request that has the prefill pod free what nobody will read."""
        return refused(handover)

    def inquiry(self, attempt: Attempt) -> Inquiry | None:
        """The registry's question, unless it was answered lately."""
        _, until = self._engines.get(attempt.prefill, ("", 0.0))
        if self._clock() < until:
            return None
        return Inquiry(self._registry(attempt.prefill), concurrent_params.BOOTSTRAP_QUERY)

    def learned(self, attempt: Attempt, answer: bytes) -> None:
        """Take the registry's answer. Raises ParamsUnusable."""
        try:
            ranks = _ranks.decode(answer)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as err:
            raise ParamsUnusable(f"mooncake's registry answered otherwise: {err}") from err
        if len(ranks) != 1:
            # A leg goes to whichever rank its engine chooses, and no id holds for all of them.
            raise ParamsUnusable(f"mooncake's registry lists {len(ranks)} ranks: only one works")
        engine_id = next(iter(ranks.values())).engine_id
        self._engines[attempt.prefill] = engine_id, self._clock() + _HOLDS

    def expected(self, attempt: Attempt) -> Handover:
        """What the decode leg needs, before the prefill answered. Raises ParamsUnusable."""
        if attempt.prefill not in self._engines:
            raise ParamsUnusable("mooncake's registry has not said the engine id")
        params = concurrent_params.MooncakeDecode(
            transfer_id=attempt.engine_id,
            remote_bootstrap_addr=f"http://{self._registry(attempt.prefill)}",
            remote_engine_id=self._engines[attempt.prefill][0],
        )
        return Handover(msgspec.json.encode(params))

    def forget(self, prefill: HostPort) -> None:
        """Ask the pod's registry again, as it may have restarted; legs under way keep theirs."""
        engine_id, _ = self._engines.get(prefill, ("", 0.0))
        if engine_id:
            self._engines[prefill] = engine_id, 0.0

    def _registry(self, prefill: HostPort) -> HostPort:
        return HostPort(prefill.host, self._port)
