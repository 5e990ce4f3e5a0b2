"""What a run sends, as plain values: the parent process passes it to its workers as JSON."""

from typing import Any

import msgspec

from tandem_contract.request_kinds import RequestKind

from ..workload.settings import Arrivals, Prompts, Workload


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go and what all of them have in common."""

    url: str
    """With or without `/v1`."""
    model: str
    endpoint: RequestKind = RequestKind.CHAT
    stream: bool = True
    timeout: float = 300.0
    """Seconds for a whole answer, from the time its request was sent."""
    headers: dict[str, str] = {}
    """Sent with every request, `authorization` among them. Never in logs or reports."""
    ca_file: str | None = None
    """PEM file of the certificate authorities to trust; None: the system's."""
    extra_body: dict[str, Any] = {}
    """Members added to every body, sampling parameters among them."""
    ignore_eos: bool = True
    """Generate exactly the scheduled number of tokens (vLLM's field)."""


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What is sent, and when."""

    target: Target
    arrivals: Arrivals
    workload: Workload
    prompts: Prompts
    seed: int = 0
    limit: int | None = None
    """Sessions in all; None: as many as start within `duration`, or as a file has."""
    duration: float | None = None
    """Seconds after which no further session starts; None: until `limit`."""
    max_in_flight: int = 1000
    """Of all processes together, each of which has an equal share: a request whose time comes while
    its process has that many in flight is never sent. Closed loop has `concurrency` instead."""


class RunSpec(Load, frozen=True, kw_only=True):
    """One run of one worker process, which sends every `parts`-th session from `part` on."""

    part: int = 0
    parts: int = 1
