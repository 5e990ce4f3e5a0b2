"""Makes from a `RunSpec` what sends it: the client, the sessions and the writer of prompts."""

from collections.abc import Iterator

from ..client import Client, ClientSettings
from ..workload.arrivals import start_times
from ..workload.prompts import PromptWriter
from ..workload.schedule import FILES, sessions, until
from ..workload.sessions import Session
from .options import Reference
from .spec import RunSpec, Target


def client_of(target: Target, *, token_ids: bool) -> Client:
    """A client of the target; `token_ids`: ask for the answers' token ids (vLLM's field)."""
    return Client(
        ClientSettings(
            url=target.url,
            model=target.model,
            timeout=target.timeout,
            headers=target.headers,
            ca_file=target.ca_file,
            extra_body=target.extra_body,
            return_token_ids=token_ids,
        )
    )


def reference_client(reference: Reference, target: Target) -> Client:
    """A client of the reference, which sends the same bodies."""
    return Client(
        ClientSettings(
            url=reference.url,
            model=reference.model or target.model,
            timeout=target.timeout,
            headers=reference.headers,
            ca_file=reference.ca_file,
            extra_body=target.extra_body,
            return_token_ids=True,
        )
    )


def writer_of(spec: RunSpec) -> PromptWriter:
    """Raises WorkloadError for a style or a tokenizer that cannot be used."""
    return PromptWriter(
        spec.prompts,
        kind=spec.target.endpoint,
        seed=spec.seed,
        stream=spec.target.stream,
        ignore_eos=spec.target.ignore_eos,
    )


def sessions_of(spec: RunSpec, writer: PromptWriter) -> Iterator[Session]:
    """The sessions of the spec's part. Raises WorkloadError, or OSError for a file."""
    return sessions(
        spec.workload,
        spec.arrivals,
        seed=spec.seed,
        limit=spec.limit,
        duration=spec.duration,
        part=spec.part,
        parts=spec.parts,
        count_tokens=writer.count,
    )


def due_sessions(spec: RunSpec) -> int:
    """How many sessions the arrivals of an open loop start within the duration, if there are as
    many. Raises ValueError without a duration."""
    if spec.duration is None:
        raise ValueError("a schedule without a duration has no end")
    times = start_times(spec.arrivals, seed=spec.seed, duration=spec.duration)
    return sum(1 for _ in until(times, spec.duration))


def has_known_end(spec: RunSpec) -> bool:
    """Whether exactly the sessions of `sessions_of` begin, unless the run is stopped.

    In closed loop with a duration, the server's speed decides how many of them begin.
    """
    if spec.arrivals.process != "closed":
        return True
    return spec.duration is None and (spec.limit is not None or spec.workload.preset in FILES)


def share_of(total: int, spec: RunSpec) -> int:
    """The part's share of a number; the shares of all parts sum to it."""
    return total // spec.parts + (spec.part < total % spec.parts)
