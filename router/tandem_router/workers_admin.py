"""The admin port of several workers: asks each, and merges the answers into one.

counters and histograms    the sum over the workers, also of those that have exited
gauges of the decision     the greatest: each worker knows the requests of all
other gauges               the sum
/state                     running requests of all; a backend is ready if each worker says so
/debug/pods                one worker's: what they learn they share
/debug/decisions           those of all
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from aiohttp import web

from tandem_contract import endpoints
from tandem_sidecar.process.admin import SupervisorAdmin
from tandem_sidecar.process.aggregate import Families, format_page, parse_page

_DECISION_GAUGE: Final = "# TYPE tandem_epp_"
_SILENT: Final = "no worker answers\n"


class WorkersAdmin(SupervisorAdmin):
    """Answers for all workers; those that do not answer are left out."""

    def routes(self) -> list[web.RouteDef]:
        """The admin port's paths and handlers."""
        return [
            *super().routes(),
            web.get(endpoints.HEALTH, self.readyz),
            web.get(endpoints.DEBUG_PODS, self.debug_pods),
            web.get(endpoints.DEBUG_DECISIONS, self.debug_decisions),
        ]

    async def metrics_page(self) -> bytes:
        """All workers' metrics."""
        total = parse_page((await super().metrics_page()).decode())
        pages = [worker.page for worker in self._workers.serving]
        return format_page({**total, **greatest_gauges(pages)})

    async def current_state(self) -> dict[str, Any]:
        """Running requests of all workers, the backends, and the processes."""
        states = {
            worker.pid: msgspec.json.decode(body)
            for worker, status, body in await self.request_all(endpoints.STATE)
            if status == 200
        }
        return merge_states(states, draining=self._workers.draining)

    async def debug_pods(self, request: web.Request) -> web.Response:
        """What one worker knows of the backends."""
        for _, status, body in await self.request_all(request.path_qs):
            if status == 200:
                return web.Response(body=body, content_type="application/json")
        raise web.HTTPServiceUnavailable(text=_SILENT)

    async def debug_decisions(self, request: web.Request) -> web.Response:
        """The decisions of all workers, newest last; 400 and 404 as one process answers."""
        answers = [(status, body) for _, status, body in await self.request_all(request.path_qs)]
        status, body = merge_decisions(answers, by_id="request_id" in request.query)
        content_type = "application/json" if status in (200, 404) else "text/plain"
        return web.Response(status=status, body=body, content_type=content_type)


def merge_decisions(answers: Sequence[tuple[int, bytes]], *, by_id: bool) -> tuple[int, bytes]:
    """Status and body of `/debug/decisions`, from those of the workers.

    A list as JSON with 200, or with 404 if the request whose id was asked for (`by_id`) is unknown;
    text otherwise. A worker that answers with another status, because it fails or ends, is left
    out; 503: all of them are.
    """
    traces: list[dict[str, Any]] = []
    for status, body in answers:
        # A question that one worker cannot understand, no worker can.
        if status == 400:
            return status, body
        if status == 200:
            traces += msgspec.json.decode(body)
    if not any(status in (200, 404) for status, _ in answers):
        return 503, _SILENT.encode()
    traces.sort(key=lambda trace: trace["decided"])
    body = msgspec.json.format(msgspec.json.encode(traces)) + b"\n"
    return (404 if by_id and not traces else 200), body


def greatest_gauges(pages: Sequence[Families]) -> Families:
    """The gauges of the decision, each sample with its greatest value on `pages`."""
    greatest: Families = {}
    for page in pages:
        for header, samples in page.items():
            if header.rpartition("\n")[2].startswith(_DECISION_GAUGE) and header.endswith("gauge"):
                values = greatest.setdefault(header, {})
                for sample, value in samples.items():
                    values[sample] = max(value, values.get(sample, value))
    return greatest


def merge_states(states: Mapping[int, Mapping[str, Any]], *, draining: bool) -> dict[str, Any]:
    """One `/state` from those of the workers, which are given by process id."""
    backends: dict[str, dict[str, Any]] = {}
    for state in states.values():
        for backend in state["backends"]:
            merged = backends.setdefault(backend["name"], dict(backend))
            merged["ready"] = merged["ready"] and backend["ready"]
            # Each worker counts the requests of all; the greatest is the latest to be told of most.
            merged["in_flight"] = max(merged["in_flight"], backend["in_flight"])
    return {
        "draining": draining,
        "in_flight": [work for state in states.values() for work in state["in_flight"]],
        "backends": list(backends.values()),
        "workers": [
            {
                "pid": pid,
                "in_flight": len(state["in_flight"]),
                # Of all workers' requests, as this one counts them: equal once all are told.
                "backends_in_flight": sum(b["in_flight"] for b in state["backends"]),
                "prefill_pods": state["prefill_pods"],
            }
            for pid, state in states.items()
        ],
    }
