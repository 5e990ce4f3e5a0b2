"""CPU of the EPP per part of a request, in one process without sockets and HTTP/2.

Ten pods, five that prefill and five that decode, a body of 1 KB, signed plans, metrics, history.
Each request goes through the functions that the server calls, and each part is timed by itself:
medians of 5,000 requests. What the parts take in a running EPP is more, because the work of other
requests and of the kernel in between empties the processor's caches.
"""

import gc
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Final, TypeVar

import click

from tandem_contract import headers as wire
from tandem_contract.config import Backend, DisaggregatedServing
from tandem_contract.documents import parse_documents
from tandem_contract.paths import Role
from tandem_epp.backends.engine_page import ScrapeResult
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.choice.routing import Routing
from tandem_epp.estimates.engine_figures import Gauges
from tandem_epp.llmd.plugins.config import load_scheduling
from tandem_epp.metrics.counters import Metrics
from tandem_epp.placement.history import History
from tandem_epp.placement.picker import EndpointPicker
from tandem_epp.replicas.shared_fleet import SharedFleet
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.messages import Continue
from tandem_epp.server.ext_proc.stream import ExtProcStream
from tandem_epp.server.ext_proc.wire_answers import encode_answer
from tandem_epp.server.ext_proc.wire_bodies import read_body
from tandem_epp.server.ext_proc.wire_headers import read_headers

from .figures import Figure, progress, report, without_target

PODS: Final = 10
REQUESTS: Final = 5000
_WARM_UP: Final = 300
_TIMING: Final = "queue=0.001200;compute=0.010000;cached=0;computed=230;leg=0.011;prompt=230"
_REPORT: Final = ((wire.TIMING, _TIMING), (wire.ROUTING_PATH, "unified"))
T = TypeVar("T")


def _picker() -> EndpointPicker:
    fleet = Fleet()
    fleet.apply(
        DiscoveredBackend(
            Backend(
                name=f"pod-{n}",
                url=f"http://10.0.0.{n + 1}:8000",
                role=Role.DECODE if n % 2 else Role.PREFILL,
                models=("bench",),
            )
        )
        for n in range(PODS)
    )
    for pod in fleet:
        pod.apply_scrape(ScrapeResult(Gauges(), b"1", 16, 60_000), 1000.0)
    serving = DisaggregatedServing(enabled=True)
    scheduling = load_scheduling(parse_documents("{}", "router.yaml")[0], {}, serving)
    routing = Routing(serving, scheduling)
    picker = EndpointPicker(fleet, routing, Metrics(fleet), History(4096), Random())
    picker.plan_keys = {"k": b"x" * 32}
    picker.observer = SharedFleet(fleet)
    return picker


def _headers(*headers: tuple[str, str]) -> pb.HttpHeaders:
    values = [pb.HeaderValue(key=name, raw_value=value.encode()) for name, value in headers]
    return pb.HttpHeaders(headers=pb.HeaderMap(headers=values))


def _head(number: int, body: bytes) -> bytes:
    message = pb.ProcessingRequest(
        request_headers=_headers(
            (":authority", "127.0.0.1:8080"), (":path", "/v1/chat/completions"),
            (":method", "POST"), (":scheme", "http"), ("user-agent", "h2load"),
            ("content-type", "application/json"), ("content-length", str(len(body))),
            ("x-forwarded-proto", "http"), (wire.REQUEST_ID, f"{number:032x}"),
        ),
        protocol_config=pb.ProtocolConfiguration(request_body_mode=2),
    )  # fmt: skip
    return message.SerializeToString()


def _response(address: str, *, has_report: bool) -> bytes:
    headers = (
        (":status", "200"), ("content-type", "application/json"), ("content-length", "300"),
        *(_REPORT if has_report else ()), ("x-envoy-upstream-service-time", "1"),
    )  # fmt: skip
    message = pb.ProcessingRequest(response_headers=_headers(*headers))
    attributes = {wire.UPSTREAM_ADDRESS: address, wire.CODE_DETAILS: "via_upstream"}
    message.attributes["envoy.filters.http.ext_proc"].update(attributes)
    return message.SerializeToString()


class Parts:
    """The samples of each part, in seconds."""

    def __init__(self) -> None:
        self.samples: dict[str, list[float]] = {}

    def time(self, part: str, run: Callable[[], T]) -> T:
        """The result of `run`, whose time counts for `part`."""
        start = perf_counter()
        result = run()
        self.samples.setdefault(part, []).append(perf_counter() - start)
        return result


def measure(*, is_repeated: bool, has_report: bool) -> Parts:
    """Time requests with the same prompt, or with a new one each; with or without the headers by
    which a sidecar reports."""
    picker, parts = _picker(), Parts()
    gc.collect()
    for number in range(-_WARM_UP, REQUESTS):
        if not number:
            parts.samples.clear()
        text = "x" * 900 if is_repeated else os.urandom(450).hex()
        request = {"model": "bench", "max_tokens": 16}
        request["messages"] = [{"role": "user", "content": text}]  # type: ignore[assignment]
        _one(picker, parts, number, json.dumps(request).encode(), has_report=has_report)
    return parts


def _one(
    picker: EndpointPicker, parts: Parts, number: int, body: bytes, *, has_report: bool
) -> None:
    now = 1000.0 + 0.001 * (number + _WARM_UP)
    content = pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=True))
    head, whole = _head(number % 2**64, body), content.SerializeToString()
    stream = ExtProcStream(picker, 4 << 20)
    request = parts.time("read request headers", lambda: read_headers(head))
    message = parts.time("read body", lambda: read_body(whole))
    assert request is not None
    assert message is not None
    parts.time("answer request headers", lambda: stream.receive(request, now))
    (answer,) = parts.time("place", lambda: stream.receive(message, now))
    parts.time("write header changes", lambda: encode_answer(answer))
    assert isinstance(answer, Continue)
    assert answer.mutation is not None
    wire_bytes = _response(answer.mutation.destination or "", has_report=has_report)
    response = parts.time("read response headers", lambda: read_headers(wire_bytes))
    assert response is not None
    parts.time("learn from response headers", lambda: stream.receive(response, now + 0.01))
    parts.time("end", lambda: stream.close(now + 0.02))


def _figures(name: str, parts: Parts) -> list[Figure]:
    medians = {part: 1e6 * median(samples) for part, samples in parts.samples.items()}
    return [
        without_target(f"all, {name}", sum(medians.values()), "µs"),
        *(without_target(f"  {part}", micros, "µs") for part, micros in medians.items()),
    ]


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), help="write the figures here")
def main(file: Path | None) -> None:
    """Measure the parts of a request."""
    figures: list[Figure] = []
    for name, is_repeated, has_report in (
        ("same prompt", True, False),
        ("same prompt, answers with a sidecar's report", True, True),
        ("new prompts, answers with a sidecar's report", False, True),
    ):
        progress(name)
        figures += _figures(name, measure(is_repeated=is_repeated, has_report=has_report))
    report(figures, file)


if __name__ == "__main__":
    main()
