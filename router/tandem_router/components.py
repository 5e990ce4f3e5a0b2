"""Creates the decision and the data path of one process and connects them."""

from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final

from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_epp.process.configuration import Configuration
from tandem_epp.process.decisions import Decisions, share
from tandem_epp.settings import Settings as EppSettings
from tandem_sidecar.process.wiring import DataPath
from tandem_sidecar.security.credentials import listen_tls
from tandem_sidecar.settings import Settings

from .admin import RouterAdmin
from .backends import ListedBackends
from .configuration import address_of, handoff_settings
from .peers import WorkerPeers
from .placed import Parts
from .placements import Placements
from .requests import RoutedRequests
from .warmups import OwnHandOffs

_SERVICE: Final = "tandem-router"
"""What spans name as their service."""


@dataclass(frozen=True)
class BackendHealth:
    """Whether some backend passes its health checks."""

    decisions: Decisions

    @property
    def healthy(self) -> bool:
        """Whether a request can be placed."""
        return bool(self.decisions.fleet.ready_pods(None))


class Components:
    """The components of a router process; nothing listens and no task runs yet."""

    def __init__(
        self,
        settings: Settings,
        epp: EppSettings,
        configuration: Configuration,
        peers: WorkerPeers | None = None,
    ) -> None:
        """`settings`: of the data path, from flags. `peers`: the other workers; None: this process
        is the only one."""
        self._flags = settings
        self._backends = ListedBackends(settings, configuration)
        self.decisions = Decisions(epp, configuration, {})
        self.decisions.picker.cleans_requests = True
        sharing = share(self.decisions, peers.settings, peers.keys) if peers else None
        self.channel = sharing.channel if sharing else None
        self.preparer = self.decisions.preparer()

    def open(self, stack: AsyncExitStack) -> None:
        """Create the data path; `stack` ends everything that runs."""
        decisions, configuration = self.decisions, self.decisions.configuration
        settings = handoff_settings(configuration, self._flags)
        tls = listen_tls(settings.listen_tls)
        decisions.start_tracing(stack, _SERVICE)
        self._path = path = DataPath(
            settings,
            self._backends.tls_for,
            stack,
            watches_transfers=self.channel is None,
            service_name=_SERVICE,
        )
        placements = Placements(path.observer)
        path.context.observer = placements
        health = BackendHealth(decisions)
        path.context.other_decode = self._other_decode
        path.context.authorization = self._backends.authorization
        parts = Parts(path.context, decisions.picker, decisions.fleet, placements)
        decisions.warm_ups.hand_offs = OwnHandOffs(parts)
        decisions.scraper.on_not_serving = lambda pod: self._empty(address_of(pod.backend))
        handler = RoutedRequests(parts, self.preparer.prepare, lambda: health.healthy)
        self.server = path.serve(handler, tls)
        self.lifecycle, self.overlaps = path.lifecycle, path.context.overlaps
        self.credentials = self._backends.credentials, tls
        # Of several workers, the supervisor counts once for all.
        is_worker = self.channel is not None
        self._counters = None if is_worker else path.engine_counters(self._backends.decode_engines)
        self.admin = RouterAdmin(decisions, path, health, self._counters)
        decisions.close_with(stack)
        stack.push_async_callback(self.preparer.close)
        self._apply_to_decisions()

    def background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that run as long as the process serves."""
        return [self._counters.follow()] if self._counters is not None else []

    def apply(self, configuration: Configuration) -> None:
        """Use a new configuration from the next request on. The streams of backends that it does
        not list any more go on at others."""
        before = self._backends.decode_engines()
        self._backends.apply(configuration)
        self.decisions.configuration = configuration
        self._apply_to_decisions()
        # The change may be that requests are split from now on.
        self.decisions.warm_ups.warm_all()
        self._path.apply(handoff_settings(configuration, self._flags))
        for engine in {*before} - {*self._backends.decode_engines()}:
            self._empty(engine)

    def _empty(self, engine: HostPort) -> None:
        """Move the streams of a decode engine that is to end, as far as others can go on with
        them."""
        for work in list(self.lifecycle.work):
            work.engine_drains(engine)

    def _apply_to_decisions(self) -> None:
        decisions = self.decisions
        decisions.apply(decisions.listed_backends())
        if self.channel is not None:
            self.channel.open()
        scraping = decisions.scraper.settings
        if scraping.tls is None:
            tls = self._backends.tls_for_checks()
            decisions.scraper.settings = replace(scraping, tls=tls)

    def _other_decode(self, engine: HostPort) -> HostPort | None:
        """A backend that may decode, passes its checks and is not at `engine`; None: there is
        none."""
        for pod in self.decisions.fleet.ready_pods(None):
            address = address_of(pod.backend)
            if address != engine and pod.backend.role.serves(Role.DECODE):
                return address
        return None
