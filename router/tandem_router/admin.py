"""The admin port: the sidecar's pages for the whole process, and the EPP's pages of decisions.

GET /metrics, /livez, /readyz, /state, /requests/ID   as on a sidecar
GET /health                                           as /readyz, for load balancers
GET /debug/decisions, /debug/pods                     as on an EPP
"""

from typing import Any

from aiohttp import web

from tandem_contract import endpoints
from tandem_contract.metrics_text import metrics_text
from tandem_epp.process.decisions import Decisions
from tandem_epp.process.pages import routes as decision_routes
from tandem_sidecar.observability.engine_counters import EngineCounters
from tandem_sidecar.process.admin import Health, ProcessAdmin
from tandem_sidecar.process.aggregate import format_page, parse_page
from tandem_sidecar.process.wiring import DataPath


class RouterAdmin(ProcessAdmin):
    """Answers for this process."""

    def __init__(
        self,
        decisions: Decisions,
        path: DataPath,
        health: Health,
        counters: EngineCounters | None,
        *,
        hands_off: bool = True,
    ) -> None:
        """`hands_off`: whether this process does. Otherwise sidecars count the requests and their
        legs, and this page leaves those families out: a sum over all would have each twice."""
        super().__init__(
            metrics=path.metrics,
            observer=path.observer,
            lifecycle=path.lifecycle,
            health=health,
            breakers=path.breakers,
            history=path.history,
            counters=counters,
        )
        self._decisions, self._hands_off = decisions, hands_off

    def routes(self) -> list[web.RouteDef]:
        """The admin port's paths and handlers."""
        fleet = self._decisions.fleet
        pages = decision_routes(self._decisions.history, fleet)
        # What `/requests/ID` of an EPP answers is here at `/debug/decisions?request_id=ID`.
        debug = [page for page in pages if not page.path.startswith(endpoints.REQUESTS)]
        return [*super().routes(), web.get(endpoints.HEALTH, self.readyz), *debug]

    async def metrics_page(self) -> bytes:
        """Both halves' metrics. A family that both have is the data path's: it serves every
        request, and an EPP counts there what no sidecar serves."""
        own = parse_page((await super().metrics_page()).decode())
        if not self._hands_off:
            own = {header: page for header, page in own.items() if not _is_of_requests(header)}
        decisions = parse_page((await metrics_text(self._decisions.metrics.registry)).decode())
        types = {_type_line(header) for header in own}
        added = {
            header: page for header, page in decisions.items() if _type_line(header) not in types
        }
        return format_page({**own, **added})

    async def current_state(self) -> dict[str, Any]:
        """The sidecar's state, and every backend."""
        state = await super().current_state()
        del state["engine_healthy"]
        ready = set(self._decisions.fleet.ready_pods(None))
        backends = [
            {
                "name": pod.name,
                "role": pod.backend.role.value,
                "url": pod.backend.url,
                "models": list(pod.backend.models),
                "ready": pod in ready,
                "in_flight": pod.in_flight,
                "weight": pod.backend.weight,
            }
            for pod in self._decisions.fleet
        ]
        return {**state, "backends": backends}


def _is_of_requests(header: str) -> bool:
    """Whether the family counts or times requests and their legs (`tandem_contract.metrics`)."""
    return _type_line(header).startswith("# TYPE disaggregated_")


def _type_line(header: str) -> str:
    """The line of a family's header that names it and its type."""
    return header.rpartition("\n")[2]
