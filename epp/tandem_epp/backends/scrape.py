"""Scrapes each backend's metrics: often while it is busy, seldom while nothing changes (`pace`).

A scrape is also the backend's health check. Where the configuration names a path for checks, the
scrape requests that first, once per interval and while checks fail.

One task starts the scrapes that are due, TICK seconds apart, so a backend that gets a request is
scraped within TICK although its idle interval has not passed.
"""

import asyncio
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random
from time import monotonic, time
from typing import Final

from tandem_contract import endpoints
from tandem_contract.commandline import HostPort
from tandem_contract.config import HealthChecks
from tandem_contract.prompt_length import LIST_SECONDS, engine_length

from ..supervised import SupervisedTask
from .engine_page import EnginePage
from .fleet import Fleet
from .http2_client import Http2Client, speaks_http2
from .members import Members
from .pace import BUSY_INTERVAL, Allowance, fresh_seconds, next_interval, select_due
from .page_client import NotServing, PageClient
from .page_reader import PageReader
from .pods import Pod
from .scrape_settings import ScrapeSettings

TICK: Final = 0.025
"""Seconds between two looks at which scrapes are due."""
_SHARE_SECONDS: Final = 0.1
"""Seconds between two rounds in which pods without samples take over the figures of alike pods."""
_DNS_SECONDS: Final = 10.0
"""Seconds for which a host name's address is used before it is resolved again."""
_log: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Target:
    """A backend that is scraped."""

    members: Members
    has_host_name: bool
    """Whether its URL names a host and not an IP address."""
    reader: PageReader = field(default_factory=PageReader)
    task: asyncio.Task[None] | None = None
    """The scrape under way."""
    interval: float = BUSY_INTERVAL
    """Seconds from one scrape to the next while the backend is idle."""
    ended_at: float = float("-inf")
    """When the last scrape ended, successful or not, in seconds of the monotonic clock."""
    jitter: float = 1.0
    """Factor of `interval` for this wait: backends that started together drift apart."""
    fresh_until: float = 0.0
    """When the figures of the last successful scrape become stale."""
    failures: int = 0
    """Failed scrapes in a row."""
    checked_at: float = float("-inf")
    """When the path of health checks was last requested, in seconds of the monotonic clock."""
    listed_at: float = float("-inf")
    """When the list of models was last requested, likewise."""
    listed_process: bytes | None = None
    """Identity of the process that was asked for it."""
    resolved_at: float = float("-inf")
    processes: dict[str, bytes | None] = field(default_factory=dict)
    """Pod name → identity of the process that answered the last scrape; a pod that is unhealthy is
    not in it."""

    @property
    def due_at(self) -> float:
        # Requests that came since the last scrape shorten the wait at once.
        pods = self.members.pods
        is_soon = not self.failures and any(pod.in_flight and pod.healthy for pod in pods)
        interval = min(BUSY_INTERVAL, self.interval) if is_soon else self.interval
        return self.ended_at + interval * self.jitter


class Scraper:
    """Scrapes the serving backends of the fleet."""

    def __init__(self, fleet: Fleet, on_backend_up: Callable[[Pod], None] = lambda _: None) -> None:
        """`on_backend_up` is called with a pod that answers for the first time, answers again
        after it was unhealthy, or answers as another process."""
        self._fleet, self._on_backend_up = fleet, on_backend_up
        self.on_not_serving: Callable[[Pod], None] = lambda _: None
        """Called with a pod that became unhealthy because it says so (503), or refuses connections:
        it may still finish what runs."""
        self.settings = ScrapeSettings()
        """Replaced as a whole, for the next scrapes."""
        self.checks = HealthChecks()
        """Likewise."""
        self._targets: dict[Members, _Target] = {}
        self._random = Random()
        self._allowance = Allowance(burst=TICK)
        self._is_complete = False
        self._client: PageClient | None = None
        self._http2 = Http2Client()
        self._loop_task: SupervisedTask | None = None

    @property
    def is_complete(self) -> bool:
        """Whether, at some moment, every backend had finished a first scrape or failed it.

        Stays True afterwards: a backend that is added later does not make the picker unready.
        """
        self._is_complete = self._is_complete or (
            # Without a client `sync` has not run yet, and `all` of no targets would be true.
            self._client is not None
            and all(target.ended_at >= 0 for target in self._targets.values())
        )
        return self._is_complete

    def sync(self) -> None:
        """Scrape exactly the fleet's serving backends from now on; to be called on the event
        loop."""
        # Created here, because it needs the running event loop.
        if self._client is None:
            self._client = client = PageClient()
            self._loop_task = SupervisedTask("scraping", lambda: self._run(client))
        backends = {members for members in self._fleet.backends if members.pods[0].serving}
        # A cancelled task need not be awaited: it changes only its own pods, which are not chosen.
        for members in self._targets.keys() - backends:
            if (task := self._targets.pop(members).task) is not None:
                task.cancel()
        for members in backends - self._targets.keys():
            has_host_name = members.pods[0].address is None
            self._targets[members] = _Target(members, has_host_name)

    async def close(self) -> None:
        """Cancel every task and wait for its end."""
        if self._loop_task is not None:
            self._loop_task.cancel()
            await self._loop_task.wait()
        tasks = [target.task for target in self._targets.values()]
        self._targets, self._loop_task = {}, None
        for task in filter(None, tasks):
            task.cancel()
        for task in filter(None, tasks):
            with suppress(asyncio.CancelledError):
                await task
        await self._http2.close()
        if self._client is not None:
            await self._client.close()

    async def _run(self, client: PageClient) -> None:
        shared_at = float("-inf")
        while True:
            now = monotonic()
            if now - shared_at >= _SHARE_SECONDS:
                shared_at = now
                self._fleet.figures.share()
            self._start_due(client, now)
            await asyncio.sleep(TICK)

    def _start_due(self, client: PageClient, now: float) -> None:
        """Start the scrapes that are due, and fade the figures of those that are late."""
        idle = [target for target in self._targets.values() if target.task is None]
        due = select_due(idle, now, self._allowance.available(now))
        self._allowance.spend(len(due))
        for target in due:
            target.task = asyncio.create_task(self._scrape(target, client))
        self._fade(now)

    def _fade(self, now: float) -> None:
        has_faded = False
        for target in self._targets.values():
            if now <= target.fresh_until:
                continue
            for pod in target.members.pods:
                if pod.healthy and pod.gauges is not None:
                    pod.fade(now - target.fresh_until)
                    has_faded = True
        if has_faded:
            self._fleet.invalidate_scores()

    async def _scrape(self, target: _Target, client: PageClient) -> None:
        """Scrape once, and set when to scrape again."""
        try:
            is_outdated = monotonic() - target.resolved_at >= _DNS_SECONDS
            # After a failed lookup `resolved_at` stays, so the next scrape tries again.
            if target.has_host_name and is_outdated and await self._resolve(target.members):
                target.resolved_at = monotonic()
            changed = await self._scrape_once(target, client)
        finally:
            target.task = None
            target.ended_at = monotonic()
        pods = target.members.pods
        # Not for an unhealthy one: the checks that prove it healthy again are not made at once.
        is_busy = changed or any(
            pod.healthy and (pod.is_busy or not pod.health.is_available) for pod in pods
        )
        target.interval = next_interval(
            target.interval, self.checks.interval, is_busy=is_busy, failures=target.failures
        )
        target.jitter = self._random.uniform(0.9, 1.1)
        if not target.failures:
            # Set only here: after a failure the figures go on fading from where they are.
            target.fresh_until = target.ended_at + fresh_seconds(target.interval)
        # Called after the scrape is applied: the callback sees the new process.
        previous = target.processes
        target.processes = {pod.name: pod.incarnation for pod in pods if pod.healthy}
        for pod in pods:
            if pod.healthy and previous.get(pod.name) != pod.incarnation:
                self._on_backend_up(pod)

    async def _scrape_once(self, target: _Target, client: PageClient) -> bool:
        """Scrape into the pods; returns whether anything changed that scorers see."""
        members = target.members
        readiness = _readiness(members)
        failure: OSError | None
        url = self._health_url(target)
        try:
            if url:
                await self._get(members, url, client)
                target.checked_at = monotonic()
            url = self.settings.metrics_url(members.url)
            body = await self._get(members, url, client)
        # A timeout is an OSError, too (TimeoutError).
        except OSError as err:
            failure, unhealthy = err, self._record_failure(target, url, err)
            changed = bool(unhealthy)
        else:
            failure, unhealthy = None, []
            target.failures = 0
            changed = self._apply_page(members, target.reader.read(body))
        # Before anything is awaited: a pod that is ready, and in no view, would get no requests.
        if readiness != _readiness(members):
            self._fleet.invalidate_views()
        elif changed:
            self._fleet.invalidate_scores()
        if isinstance(failure, NotServing):
            # After the views: streams that move must not be placed there again.
            for pod in unhealthy:
                self.on_not_serving(pod)
        if not target.failures:
            await self._read_models(target, client)
        return changed

    def _record_failure(self, target: _Target, url: str, err: OSError) -> list[Pod]:
        """Count a failed check; returns the pods that it made unhealthy."""
        target.failures += 1
        target.listed_process = None
        pods, now = target.members.pods, time()
        if isinstance(err, TimeoutError):
            # A page that hangs while requests are answered says nothing of the engine.
            pods = tuple(pod for pod in pods if not pod.has_answered(now))
        unhealthy = [pod for pod in pods if pod.record_failed_check(self.checks)]
        for pod in unhealthy:
            _log.warning(
                "backend %s is unhealthy and gets no requests until it answers %s: %s",
                pod.name,
                url,
                str(err) or type(err).__name__,
            )
        return unhealthy

    def _health_url(self, target: _Target) -> str:
        """What to request before the metrics page; empty: nothing."""
        path = self.checks.path
        if path is None:
            return ""
        # The page alone proves no health: an unhealthy backend needs both answers at each check.
        is_doubtful = target.failures or not target.members.pods[0].healthy
        # Early rather than late: the next scrape may be twice as far away as this one was.
        waited = monotonic() - target.checked_at + 2 * target.interval
        is_due = is_doubtful or waited >= self.checks.interval
        return target.members.url.rstrip("/") + path if is_due else ""

    async def _read_models(self, target: _Target, client: PageClient) -> None:
        """Read the engine's list of models for the length of its prompts: once of each process, and
        seldom again."""
        members, now = target.members, monotonic()
        process = members.pods[0].incarnation
        if process == target.listed_process and now - target.listed_at < LIST_SECONDS:
            return
        target.listed_process, target.listed_at = process, now
        credentials, length = members.pods[0].backend.credentials, None
        api_key = "" if credentials is None else credentials.api_key
        # An API key may hold what no header can.
        with suppress(OSError, ValueError):
            url = members.url.rstrip("/") + endpoints.MODELS
            length = engine_length(await self._get(members, url, client, api_key))
        for pod in members.pods:
            pod.max_model_len = length

    async def _get(
        self, members: Members, url: str, client: PageClient, api_key: str = ""
    ) -> bytes:
        """The body of a 2xx answer. Raises OSError."""
        backend = members.pods[0].backend
        if speaks_http2(backend, url):
            return await self._http2.get(url, self.checks.timeout)
        tls = self.settings.tls_for(backend, url)
        return await client.get(url, self.checks.timeout, tls, api_key)

    def _apply_page(self, members: Members, page: EnginePage) -> bool:
        """Apply a page to the pods; returns whether anything changed that scorers see."""
        # A page without load figures says nothing about the ranks: the engine may be starting.
        if page.has_load:
            self._fleet.set_ranks(members, max(1, len(page.ranks)))
        if page.total.adapters is not None:
            self._fleet.learn_adapters(page.total.adapters)
        changed, now = False, time()
        results = page.ranks or (page.total,) * len(members.pods)
        for pod, result in zip(members.pods, results, strict=True):
            was_healthy = pod.healthy
            changed |= pod.apply_scrape(result, now, self.checks)
            if pod.healthy and not was_healthy:
                _log.info("backend %s is healthy again", pod.name)
        return changed

    async def _resolve(self, members: Members) -> bool:
        """Look up the backend's host name; False, with a warning logged, when that fails."""
        backend = members.pods[0].backend
        host, _, port = backend.address.rpartition(":")
        loop = asyncio.get_running_loop()
        try:
            answers = await loop.getaddrinfo(host, int(port), proto=socket.IPPROTO_TCP)
        except OSError as err:
            _log.warning("backend %s: cannot resolve %s: %s", backend.name, host, err.strerror)
            return False
        address = str(HostPort(str(answers[0][4][0]), int(port)))
        for pod in members.pods:
            if address != pod.address:
                pod.address = address
                self._fleet.invalidate_views()
        return True


def _readiness(members: Members) -> list[object]:
    """All that a page can change and that the fleet's views depend on."""
    return [(pod.healthy, pod.health.is_available, pod.adapters.exclusive) for pod in members.pods]
