"""Creates the decision and the data path of one process and connects them."""

from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from tandem_contract.api_keys import ApiKeys
from tandem_contract.commandline import HostPort
from tandem_contract.paths import Role
from tandem_contract.plan_keys import PlanKeys
from tandem_epp.backends.pods import DiscoveredBackend
from tandem_epp.process.configuration import Configuration, listed_backends
from tandem_epp.process.decisions import Decisions, Sharing, share
from tandem_epp.process.discovery import Discovery, discover
from tandem_epp.replicas.peers.channel import PeerChannel, PeerSettings
from tandem_epp.settings import Settings as EppSettings
from tandem_sidecar.process.wiring import DataPath
from tandem_sidecar.security.credentials import listen_tls
from tandem_sidecar.settings import Settings

from .admin import RouterAdmin
from .backends import KnownBackends
from .configuration import address_of, handoff_settings
from .peers import WorkerPeers
from .placed import Parts
from .placements import Placements
from .requests import RoutedRequests
from .waiting import WaitingRequests
from .warmups import OwnHandOffs

if TYPE_CHECKING:
    from tandem_kube.client import Api

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


@dataclass(frozen=True)
class Readiness:
    """Whether a router of a cluster knows what it needs to choose, as an EPP: also while no backend
    is healthy, since its answer then says so."""

    decisions: Decisions
    discovery: Discovery
    channel: PeerChannel | None

    @property
    def healthy(self) -> bool:
        """Whether the pods were listed and asked once, and other replicas have told their part."""
        is_informed = self.channel is None or self.channel.is_informed
        return self.discovery.is_known and self.decisions.scraper.is_complete and is_informed


class SharedKeys:
    """The plan keys, by which replicas authenticate each other, too."""

    def __init__(self, keys: PlanKeys, channel: PeerChannel | None) -> None:
        self._keys, self._channel = keys, channel

    def reload(self) -> None:
        """Read them again; replicas use changed ones at once."""
        before = self._keys.current
        self._keys.reload()
        if self._channel is not None and self._keys.current is not before:
            self._channel.use_keys(self._keys.current)


class Components:
    """The components of a router process; nothing listens and no task runs yet."""

    def __init__(
        self,
        settings: Settings,
        epp: EppSettings,
        configuration: Configuration,
        peers: WorkerPeers | None = None,
        api_keys: ApiKeys | None = None,
    ) -> None:
        """`settings`: of the data path, from flags. `epp`: of the decision; with plan keys, the
        sidecars in front of the engines hand off. `peers`: the other workers; None: this process is
        the only one. `api_keys`: of the clients that are served; None: all are. Raises ValueError
        and OSError when the plan keys cannot be used."""
        self._flags, self._api_keys = settings, api_keys
        self._backends = KnownBackends(settings)
        self._keys = PlanKeys(epp.plan_key_dir) if epp.plan_key_dir is not None else None
        self.decisions = Decisions(epp, configuration, {})
        self.decisions.picker.cleans_requests = True
        self._backends.mutual_tls = lambda: self.decisions.mutual_tls
        self._has_mutual_tls = epp.mutual_tls is not None
        self._is_worker = peers is not None
        self.sharing = self._share(epp, peers)
        self.channel = self.sharing.channel if self.sharing else None
        self.preparer = self.decisions.preparer()
        self._discovery: Discovery | None = None
        """None: the file lists the backends."""

    def _share(self, epp: EppSettings, peers: WorkerPeers | None) -> Sharing | None:
        """What other workers or other replicas are told; None: there are none."""
        if peers is not None:
            return share(self.decisions, peers.settings, peers.keys)
        if not epp.peers:
            return None
        settings = PeerSettings(peers=epp.peers, listen=epp.peer_listen)
        return share(self.decisions, settings, self._keys.current if self._keys else {})

    def find_pods(self, api: "Api", epp: EppSettings) -> Discovery:
        """Use the pods of a cluster as the backends, once the discovery that is returned runs."""
        if epp.pods is None:
            raise ValueError("the settings select no pods")
        self._discovery, collector = discover(api, epp.pods, self._use_backends)
        self.decisions.metrics.registry.register(collector)
        return self._discovery

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
            watches_transfers=not (self._is_worker or self._keys),
            service_name=_SERVICE,
        )
        placements = Placements(path.observer)
        path.context.observer = placements
        path.lifecycle.ends_with_engines = False
        health = BackendHealth(decisions)
        path.context.other_decode = self._other_decode
        path.context.authorization = self._backends.authorization
        keys = self._keys
        parts = Parts(
            path.context,
            decisions.picker,
            decisions.fleet,
            placements,
            WaitingRequests(path.lifecycle),
            keys,
            sidecars_verify=self._has_mutual_tls,
        )
        if keys is None:
            decisions.warm_ups.hand_offs = OwnHandOffs(parts)
        else:
            # The picker itself has none: plans are signed as the requests are sent.
            decisions.warm_up_keys = lambda: keys.current
        decisions.scraper.on_not_serving = lambda pod: self._empty(address_of(pod.backend))
        self._handler = RoutedRequests(
            parts, self.preparer.prepare, lambda: health.healthy, self._api_keys
        )
        check_head = None if self._api_keys is None else self._handler.check_head
        self.server = path.serve(self._handler, tls, check_head)
        decisions.flow.limit_bytes(self.server.clients.held.limit // 2)
        self.lifecycle, self.overlaps = path.lifecycle, path.context.overlaps
        shared_keys = SharedKeys(keys, self.channel) if keys is not None else None
        self.credentials = self._backends.credentials, tls, shared_keys
        # Of several workers, the supervisor counts once for all; and sidecars count themselves.
        is_counted = self._is_worker or keys is not None
        self._counters = None if is_counted else path.engine_counters(self._backends.decode_engines)
        readiness = (
            health
            if self._discovery is None
            else Readiness(decisions, self._discovery, self.channel)
        )
        self.admin = RouterAdmin(decisions, path, readiness, self._counters, hands_off=keys is None)
        decisions.close_with(stack)
        stack.push_async_callback(self.preparer.close)
        self._use_backends()

    def background_tasks(self) -> list[Coroutine[Any, Any, None]]:
        """Coroutines that run as long as the process serves."""
        return [self._counters.follow()] if self._counters is not None else []

    def apply(self, configuration: Configuration) -> None:
        """Use a new configuration from the next request on. The streams of backends that it does
        not list any more go on at others."""
        self.decisions.configuration = configuration
        self._use_backends()
        # The change may be that requests are split from now on.
        self.decisions.warm_ups.warm_all()
        self._path.apply(handoff_settings(configuration, self._flags))

    def leave(self) -> None:
        """The process ends soon. Requests are still served, and their connections closed with the
        answer, so that clients open the next ones elsewhere."""
        self._handler.is_leaving = True

    def _empty(self, engine: HostPort) -> None:
        """Move the streams of a decode engine that is to end, as far as others can go on with
        them."""
        for work in list(self.lifecycle.work):
            work.engine_drains(engine)

    def _current_backends(self) -> list[DiscoveredBackend]:
        configuration = self.decisions.configuration
        if self._discovery is None:
            return listed_backends(configuration)
        routing = configuration.routing
        found = self._discovery.backends(routing.serving.domain_label)
        scraping, by_tls = routing.scheduling.scraping, self._has_mutual_tls
        return [scraping.with_scheme(backend, to_sidecars=by_tls) for backend in found]

    def _use_backends(self) -> None:
        """Decide by the current configuration and backends from now on. The streams of backends
        that have left, or leave, go on at others."""
        before, decisions = self._backends.decode_engines(), self.decisions
        backends = self._current_backends()
        self._backends.apply(backends)
        decisions.apply(backends)
        # Before, what others tell of pods that this process does not know yet would be lost.
        if self.channel is not None and (self._discovery is None or self._discovery.is_known):
            self.channel.open()
        scraping = decisions.scraper.settings
        if scraping.tls is None:
            tls = self._backends.tls_for_checks()
            decisions.scraper.settings = replace(scraping, tls=tls)
        for engine in {*before} - {*self._backends.decode_engines()}:
            self._empty(engine)

    def _other_decode(self, engine: HostPort) -> HostPort | None:
        """A backend that may decode, passes its checks and is not at `engine`; None: there is
        none."""
        for pod in self.decisions.fleet.ready_pods(None):
            address = address_of(pod.backend)
            if address != engine and pod.backend.role.serves(Role.DECODE):
                return address
        return None
