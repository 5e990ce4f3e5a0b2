"""Requests that wait for room, from their body to their placement or their refusal."""

import asyncio
import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic, time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tandem_contract import headers as wire
from tandem_contract.config import Backend, FlowBand
from tandem_contract.config import FlowControl as FlowSettings
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.backends.precise import PrecisePrefixes
from tandem_epp.exchange import HttpRequest, NotPlaced
from tandem_epp.flow import control
from tandem_epp.flow.elsewhere import Group, Share, Went
from tandem_epp.flow.flows import LEAD, YIELD_SECONDS, shed_share
from tandem_epp.flow.saturation import PATIENCE
from tandem_epp.placement.placement import Placement
from tandem_epp.placement.preparer import Preparer
from tandem_epp.prefix.blocks import BlockMatch
from tandem_epp.prefix.kv_events.collector import PreciseMatch
from tandem_epp.prefix.kv_events.feed import Knowledge
from tandem_epp.replicas.shared_fleet import SharedFleet
from tandem_planner.cost import wait_seconds
from tandem_planner.objective import make_objective

from ..placement.test_picker import LONG, PickerSetup
from ..simulation.replicas import LoopbackMesh

ON = FlowSettings(enabled=True)
Waiter = tuple[str, asyncio.Task[Placement]]
"""A tenant and its request."""
UNIFIED = {"u": "unified"}
SPLIT = {"d": "decode", "p": "prefill"}


class FlowSetup(PickerSetup):
    """A picker with flow control, whose pods compute one request at a time."""

    def __init__(self, settings: FlowSettings = ON, **roles: str) -> None:
        super().__init__(**roles or UNIFIED)
        self.flow = self.flow_control(settings)
        precise = PrecisePrefixes(self.fleet, lambda *_: None)
        rewrites, faults = self.picker.rewrites, self.metrics.faults
        self.preparer = Preparer(precise, rewrites, faults, self.flow)
        for pod in self.fleet:
            pod.estimates.slots.limit = 1
            # Their figures never become old.
            pod.scraped_at = inf

    async def send(
        self, prompt: str = LONG, model: str = "m", *, stream: bool = False, **headers: str
    ) -> Placement:
        """Place a request as a server does. Raises NotPlaced."""
        fields = {"stream": True} if stream else {}
        body = json.dumps({"model": model, "prompt": prompt, **fields}).encode()
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = HttpRequest("POST", "/v1/completions", named)
        context = self.preparer.prepare(request, body)
        if context is None:
            return self.picker.place(request, body, time())
        async with context as preparation:
            prepared = replace(request, preparation=preparation)
            return self.picker.place(prepared, body, time())

    async def start(self, prompt: str = LONG, **headers: str) -> asyncio.Task[Placement]:
        """Send a request that waits."""
        task = asyncio.create_task(self.send(prompt, **headers))
        # A task runs until it waits for its turn.
        await asyncio.sleep(0)
        return task

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds."""
        async with asyncio.timeout(10):
            while not condition():
                await asyncio.sleep(0.002)

    @property
    def held(self) -> int:
        """Requests that wait."""
        return self.flow.waiting

    @property
    def held_bytes(self) -> float | None:
        return self.metrics.registry.get_sample_value("tandem_epp_flow_held_bytes")

    def ended(self, result: str, priority: int = 0) -> float | None:
        labels = {"priority": str(priority), "result": result}
        return self.metrics.registry.get_sample_value("tandem_epp_flow_ended_total", labels)


@contextmanager
def refused(status: int, reason: str, dropped: str) -> Iterator[None]:
    with pytest.raises(NotPlaced) as refusal:
        yield
    assert (refusal.value.reply.status, refusal.value.reason) == (status, reason)
    headers = dict(refusal.value.reply.headers)
    assert headers[wire.REQUEST_DROPPED_REASON] == dropped
    assert int(headers[wire.RETRY_AFTER]) >= 1


async def test_a_request_waits_for_nothing_while_a_pod_has_room() -> None:
    setup = FlowSetup(u="unified", v="unified")
    body = json.dumps({"model": "m", "prompt": LONG}).encode()
    request = HttpRequest("POST", "/v1/completions", {})
    await setup.send()
    assert setup.preparer.prepare(request, body) is None
    await setup.send()
    assert setup.preparer.prepare(request, body) is not None


async def test_it_goes_as_soon_as_there_is_room() -> None:
    setup = FlowSetup()
    first = await setup.send()
    waiting = await setup.start()
    assert setup.held == 1
    assert setup.held_bytes == len(json.dumps({"model": "m", "prompt": LONG}))
    first.end(time())
    placed = await waiting
    assert placed.decision.held > 0
    assert placed.decision.trace().held == placed.decision.held
    assert (setup.held, setup.held_bytes) == (0, 0)
    assert setup.ended("went") == 1


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(0, 1e4))
def test_sheddable_requests_are_refused_the_more_the_longer_they_would_wait(
    wait: float, more: float, patience: float
) -> None:
    share, longer = shed_share(wait, patience), shed_share(wait + more, patience)
    assert 0.0 <= share <= longer <= 1.0
    if patience > 0:
        # Gradually: no step anywhere, none who would not wait, all who would wait in vain.
        assert longer - share <= more / patience * (1 + 1e-9) + 1e-9
        assert shed_share(0.0, patience) == 0.0
        assert shed_share(patience, patience) == 1.0


async def test_the_important_go_first_and_tenants_take_turns() -> None:
    setup = FlowSetup()
    placed = await setup.send()
    order: list[str] = []

    async def send(name: str, **headers: str) -> None:
        nonlocal placed
        placed = await setup.send(**headers)
        order.append(name)

    tasks = []
    for name, headers in (
        ("a1", {"x_llm_d_inference_fairness_id": "a"}),
        ("a2", {"x_llm_d_inference_fairness_id": "a"}),
        ("b1", {"x_gateway_inference_fairness_id": "b"}),
        ("important", {"priority": "1"}),
        ("late", {"priority": "-1"}),
    ):
        tasks.append(asyncio.create_task(send(name, **headers)))
        await asyncio.sleep(0)
    for number in range(5):
        placed.end(time())
        while len(order) == number:
            await asyncio.sleep(0.001)
    await asyncio.gather(*tasks)
    assert order == ["important", "a1", "b1", "a2", "late"]


async def test_one_goes_at_a_time_and_counts_before_the_next() -> None:
    setup = FlowSetup(u="unified", v="unified")
    running = [await setup.send(), await setup.send()]
    waiting = [await setup.start() for _ in range(4)]
    for placed in running:
        placed.end(time())
    done, left = await asyncio.wait(waiting, timeout=0.2)
    assert (len(done), len(left)) == (2, 2)
    assert sorted(pod.in_flight for pod in setup.fleet) == [1, 1]
    for task in left:
        task.cancel()
    await asyncio.wait(left)


async def test_whoever_waited_too_long_is_refused() -> None:
    bands = (FlowBand(priority=1, ttl=0.01),)
    setup = FlowSetup(FlowSettings(enabled=True, bands=bands))
    await setup.send()
    with refused(429, "flow_expired", "rejected-ttl-expired"):
        await setup.send(priority="1")
    with refused(429, "flow_expired", "rejected-ttl-expired"):
        await setup.send(x_llm_d_inference_ttl="10ms")
    assert setup.ended("flow_expired", 1) == setup.ended("flow_expired") == 1
    assert setup.history.latest(1)[0].reason == "flow_expired"
    assert (setup.held, setup.held_bytes) == (0, 0)


async def test_several_that_waited_too_long_at_once_are_all_refused() -> None:
    """As after a stall of the process."""
    setup = FlowSetup(replace(ON, ttl=0.05))
    await setup.send()
    late = [await setup.start() for _ in range(3)]
    for held in late:
        with refused(429, "flow_expired", "rejected-ttl-expired"):
            await held


async def test_a_full_band_refuses_the_newest() -> None:
    setup = FlowSetup(FlowSettings(enabled=True, max_requests=1))
    running = await setup.send()
    waiting = await setup.start()
    with refused(429, "flow_full", "rejected-saturated"):
        await setup.send()
    important = await setup.start(priority="1")
    running.end(time())
    (await important).end(time())
    await waiting


@pytest.mark.parametrize("displace", [False, True])
async def test_a_higher_priority_takes_the_place_of_a_lower_one(displace: bool) -> None:
    size = len(json.dumps({"model": "m", "prompt": LONG}))
    settings = FlowSettings(enabled=True, max_bytes=2 * size, displace=displace)
    setup = FlowSetup(settings)
    await setup.send()
    old, new = await setup.start(), await setup.start()
    if not displace:
        with refused(429, "flow_full", "rejected-saturated"):
            await setup.send(priority="1")
    else:
        important = await setup.start(priority="1")
        with refused(429, "flow_displaced", "evicted-priority"):
            await new
        with refused(429, "flow_full", "rejected-saturated"):
            await setup.send()
        important.cancel()
    for task in (old, new):
        task.cancel()


async def test_a_client_that_leaves_is_forgotten_at_once() -> None:
    setup = FlowSetup()
    running = await setup.send()
    leaving, staying = await setup.start(), await setup.start()
    leaving.cancel()
    await asyncio.wait([leaving])
    assert setup.held == 1
    assert setup.ended("left") == 1
    running.end(time())
    (await staying).end(time())
    assert [pod.in_flight for pod in setup.fleet] == [0]


async def test_a_client_that_leaves_when_it_may_go_keeps_no_other_waiting() -> None:
    setup = FlowSetup()
    running = await setup.send()
    leaving, staying = await setup.start(), await setup.start()
    running.end(time())
    while setup.held == 2:
        await asyncio.sleep(0)
    leaving.cancel()
    (await staying).end(time())
    assert [pod.in_flight for pod in setup.fleet] == [0]


async def test_all_that_wait_are_answered_when_the_process_ends() -> None:
    setup = FlowSetup()
    await setup.send()
    waiting = [await setup.start(priority=str(number)) for number in range(3)]
    await setup.flow.close()
    for task in waiting:
        with refused(503, "flow_stopping", "rejected-shutting-down"):
            await task
    with refused(503, "flow_stopping", "rejected-shutting-down"):
        await setup.send()


async def test_all_go_when_it_is_switched_off() -> None:
    setup = FlowSetup()
    await setup.send()
    waiting = [await setup.start() for _ in range(3)]
    setup.flow.settings = None
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("seconds", [0.0, 60.0])
async def test_a_request_may_wait_for_the_first_pod(seconds: float) -> None:
    setup = FlowSetup(FlowSettings(enabled=True, no_endpoint_ttl=seconds))
    backend = setup["u"].backend
    setup.fleet.apply(())
    if not seconds:
        with refused(503, "no_backend", "rejected-no-endpoints"):
            await setup.send()
        return
    waiting = await setup.start()
    with refused(503, "no_backend", "rejected-no-endpoints"):
        await setup.send(x_llm_d_inference_ttl="10ms")
    setup.fleet.apply([DiscoveredBackend(backend)])
    await waiting


async def test_each_model_waits_for_its_own_pods() -> None:
    setup = FlowSetup()
    backends = [setup["u"].backend]
    backends.append(Backend(name="v", url="http://10.0.0.9:8000", models=("other",)))
    setup.fleet.apply(map(DiscoveredBackend, backends))
    await setup.send()
    waiting = await setup.start()
    await setup.send(model="other")
    assert setup.held == 1
    with refused_as_unknown():
        await setup.send(model="unknown")
    waiting.cancel()


@contextmanager
def refused_as_unknown() -> Iterator[None]:
    with pytest.raises(NotPlaced) as refusal:
        yield
    assert refusal.value.reply.status == 404


async def test_what_needs_no_prefill_pod_waits_for_none() -> None:
    setup = FlowSetup(**SPLIT)
    routing = setup.picker.routing
    cost = dataclasses.replace(routing.scheduling.cost, max_prefill_on_decode=64)
    scheduling = dataclasses.replace(routing.scheduling, cost=cost)
    setup.picker.routing = dataclasses.replace(routing, scheduling=scheduling)
    setup["d"].estimates.slots.limit = 9
    first = await setup.send()
    assert first.decision.prefill
    split = await setup.start("other " * 400)
    short = await setup.send("hello")
    assert not short.decision.prefill
    assert not split.done()
    split.cancel()


async def test_dead_metrics_pages_stop_nothing() -> None:
    setup = FlowSetup()
    setup["u"].scraped_at = 0.0
    await setup.send()
    await setup.start()
    # One goes each second, whatever the last figures said.
    placed = await setup.send()
    assert placed.decision.decode[0].name == "u"


class Replicas:
    """Replicas with flow control that tell each other what they do."""

    def __init__(self, number: int = 2, settings: FlowSettings = ON) -> None:
        self.setups = [FlowSetup(settings) for _ in range(number)]
        shared = [SharedFleet(each.fleet, waiting=each.flow.elsewhere) for each in self.setups]
        self._mesh = LoopbackMesh(shared, delay=0.0)
        self.runs: list[Placement] = []
        """What runs."""
        for index, each in enumerate(self.setups):
            shared[index].publisher = self._mesh.channel(index)
            each.picker.observer = shared[index]

    def tell(self) -> None:
        """Deliver what was sent."""
        self._mesh.advance(self._mesh.now + 1.0)

    async def served(self, requests: int, waiting: list[Waiter]) -> list[str]:
        """Tenants of the next requests that go, at least so many; each takes as long as it takes
        all replicas to hear of it."""
        tenants: list[str] = []
        while len(tenants) < requests:
            for each in self.runs:
                each.end(time())
            self.tell()
            async with asyncio.timeout(10):
                # Two replicas may see the same room.
                while not (gone := [each for each in waiting if each[1].done()]):
                    self.tell()
                    await asyncio.sleep(0.001)
            self.tell()
            self.runs = [await task for _, task in gone]
            tenants += [tenant for tenant, _ in gone]
            waiting[:] = [each for each in waiting if each not in gone]
        return tenants


@pytest.mark.usefixtures("patience")
async def test_the_important_go_first_at_all_replicas() -> None:
    replicas = Replicas()
    first, second = replicas.setups
    running = await first.send()
    replicas.tell()
    low = await first.start()
    high = await second.start(priority="1")
    replicas.tell()
    assert (first.held, second.held) == (1, 1)
    running.end(time())
    replicas.tell()
    placed = await high
    replicas.tell()
    assert not low.done()
    placed.end(time())
    replicas.tell()
    await low


async def test_a_replica_yields_as_long_as_the_important_go_at_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setup = FlowSetup()
    running = await setup.send()
    waiting = await setup.start()
    group = Group("m", 9, is_split=False)
    setup.flow.elsewhere.learn("other", group, Share(100))
    running.end(time())
    now = monotonic()
    monkeypatch.setattr(control, "monotonic", lambda: now)

    async def look() -> None:
        setup.flow.settings = setup.flow.settings
        await asyncio.sleep(0)

    for _ in range(4):
        setup.flow.elsewhere.learn("other", group, Share(100), Went("t", 1.0))
        await look()
        now += YIELD_SECONDS * 0.9
        await look()
        assert not waiting.done()
    now += YIELD_SECONDS
    await look()
    await waiting


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("at_second", [0, 12], ids=["of others only", "also of the first tenant"])
async def test_a_tenant_has_one_share_of_all_replicas(at_second: int) -> None:
    replicas = Replicas()
    first, second = replicas.setups
    replicas.runs = [await first.send()]
    replicas.tell()
    tenants = [(first, "a")] * 24 + [(second, "a")] * at_second
    tenants += [(second, name) for name in "bcd" for _ in range(12)]
    waiting = [
        (name, await setup.start(x_llm_d_inference_fairness_id=name)) for setup, name in tenants
    ]
    replicas.tell()
    served = await replicas.served(36, waiting)
    # One of four tenants, whichever replica has its requests.
    assert served.count("a") <= 9 + LEAD
    assert min(served.count(name) for name in "bcd") >= 9 - LEAD
    for _, task in waiting:
        task.cancel()


@pytest.mark.usefixtures("patience")
async def test_shares_of_tokens_are_those_of_all_replicas() -> None:
    replicas = Replicas(settings=FlowSettings(enabled=True, fairness="tokens"))
    first, second = replicas.setups
    replicas.runs = [await first.send()]
    replicas.tell()
    waiting = [
        (name, await setup.start(LONG * times, x_llm_d_inference_fairness_id=name))
        for setup, name, times in [(first, "short", 1)] * 60 + [(second, "long", 20)] * 20
    ]
    replicas.tell()
    served = await replicas.served(44, waiting)
    # One is as long as about twenty, and one replica is at most four of the longest ahead.
    assert served.count("long") <= 3 + LEAD
    for _, task in waiting:
        task.cancel()


@pytest.mark.usefixtures("patience")
async def test_a_tenant_that_never_has_two_requests_gets_one_share_of_all_replicas() -> None:
    replicas = Replicas()
    first, second = replicas.setups
    replicas.runs = [await first.send()]
    replicas.tell()

    async def one_more() -> Waiter:
        return "a", await first.start(x_llm_d_inference_fairness_id="a")

    waiting = [
        (name, await second.start(x_llm_d_inference_fairness_id=name))
        for name in "bcde"
        for _ in range(16)
    ]
    served: list[str] = []
    while len(served) < 40:
        if not any(name == "a" for name, _ in waiting):
            waiting.append(await one_more())
        replicas.tell()
        served += await replicas.served(1, waiting)
    # A fifth.
    assert served.count("a") <= 8 + LEAD
    for _, task in waiting:
        task.cancel()


async def test_who_meets_an_empty_queue_waits_for_those_elsewhere() -> None:
    setup = FlowSetup()
    setup.flow.elsewhere.learn("other", Group("m", 9, is_split=False), Share(100))
    task = await setup.start()
    assert setup.held == 1
    setup.flow.elsewhere.learn("other", Group("m", 9, is_split=False), Share())
    await task


async def test_those_of_a_lower_priority_elsewhere_are_in_nobodys_way() -> None:
    setup = FlowSetup()
    setup.flow.elsewhere.learn("other", Group("m", -1, is_split=False), Share(100))
    await setup.send()


async def test_others_of_a_lower_priority_take_no_bytes_where_they_could_be_displaced() -> None:
    size = len(json.dumps({"model": "m", "prompt": LONG}))
    setup = FlowSetup(FlowSettings(enabled=True, max_bytes=2 * size, displace=True))
    await setup.send()
    setup.flow.elsewhere.learn("other", Group("m", 0, is_split=False), Share(2, 2 * size))
    waiting = await setup.start(priority="1")
    assert setup.held == 1
    waiting.cancel()


async def test_what_another_replica_lets_go_is_charged_to_its_tenant_here() -> None:
    setup = FlowSetup()
    running = await setup.send()
    group = Group("m", 0, is_split=False)
    waiting = [
        await setup.start(x_llm_d_inference_fairness_id=name) for name in ("a", "a", "b", "b")
    ]
    for _ in range(2):
        setup.flow.elsewhere.learn("other", group, Share(), Went("a", 1.0))
    for expected in (2, 3, 0, 1):
        running.end(time())
        running = await waiting[expected]
    running.end(time())


async def test_bytes_are_those_of_all_replicas() -> None:
    size = len(json.dumps({"model": "m", "prompt": LONG}))
    setup = FlowSetup(FlowSettings(enabled=True, max_bytes=2 * size))
    await setup.send()
    waiting = await setup.start()
    setup.flow.elsewhere.learn("other", Group("m", 0, is_split=False), Share(1, size))
    with refused(429, "flow_full", "rejected-saturated"):
        await setup.send()
    waiting.cancel()


async def test_a_replica_alone_has_its_part_of_the_limits() -> None:
    setup = FlowSetup(FlowSettings(enabled=True, max_requests=4))
    # Of two, one cannot be reached.
    setup.flow.elsewhere.part = lambda: 0.5
    await setup.send()
    waiting = [await setup.start() for _ in range(2)]
    with refused(429, "flow_full", "rejected-saturated"):
        await setup.send()
    for task in waiting:
        task.cancel()


async def test_a_bands_limit_is_that_of_all_replicas() -> None:
    setup = FlowSetup(FlowSettings(enabled=True, max_requests=2))
    await setup.send()
    waiting = await setup.start()
    setup.flow.elsewhere.learn("other", Group("m", 0, is_split=False), Share(1))
    with refused(429, "flow_full", "rejected-saturated"):
        await setup.send()
    setup.flow.elsewhere.forget("other")
    more = await setup.start()
    assert setup.held == 2
    for task in (waiting, more):
        task.cancel()


async def test_what_is_no_generation_waits_for_nothing() -> None:
    setup = FlowSetup()
    await setup.send()
    request = HttpRequest("POST", "/v1/load_lora_adapter", {})
    assert setup.preparer.prepare(request, b"{}") is None
    bad = HttpRequest("POST", "/v1/completions", {})
    context = setup.preparer.prepare(bad, b"no JSON")
    assert context is not None
    async with context as preparation:
        with pytest.raises(NotPlaced) as refusal:
            setup.picker.place(replace(bad, preparation=preparation), b"no JSON", time())
    assert refusal.value.reply.status == 400


async def test_pods_of_another_model_let_nothing_go() -> None:
    setup = FlowSetup()
    backend = setup["u"].backend
    await setup.send()
    waiting = [await setup.start() for _ in range(3)]
    other = Backend(name="v", url="http://10.0.0.9:8000", models=("other",))
    setup.fleet.apply(map(DiscoveredBackend, (backend, other)))
    done, _ = await asyncio.wait(waiting, timeout=0.1)
    assert not done
    assert setup.held == 3
    for task in waiting:
        task.cancel()


async def test_a_model_whose_pods_went_is_waited_for_beside_another() -> None:
    setup = FlowSetup(FlowSettings(enabled=True, no_endpoint_ttl=60.0))
    backend = setup["u"].backend
    other = Backend(name="v", url="http://10.0.0.9:8000", models=("other",))
    setup.fleet.apply(map(DiscoveredBackend, (backend, other)))
    setup.fleet.apply([DiscoveredBackend(other)], now=time())
    waiting = await setup.start()
    assert setup.held == 1
    setup.fleet.apply(map(DiscoveredBackend, (backend, other)))
    await waiting


async def test_a_model_that_is_expected_is_waited_for_and_told_to_scalers() -> None:
    setup = FlowSetup(FlowSettings(enabled=True, no_endpoint_ttl=60.0))
    backend = setup["u"].backend
    other = Backend(name="v", url="http://10.0.0.9:8000", models=("other",))
    with refused_as_unknown():
        setup.fleet.apply([DiscoveredBackend(other)])
        await setup.send()
    setup.fleet.expected_models = frozenset({"m"})
    setup.fleet.invalidate_views()
    waiting = [await setup.start() for _ in range(2)]

    def told(name: str) -> float | None:
        registry = setup.metrics.registry
        return registry.get_sample_value(f"tandem_epp_flow_model_{name}", {"model": "m"})

    assert told("requests") == 2
    # Prompts and expected answers.
    assert (told("tokens") or 0) > 2 * setup.fleet.figures.output_tokens
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    assert told("requests") == 1
    setup.fleet.apply(map(DiscoveredBackend, (backend, other)))
    await waiting[1]
    assert (told("requests"), told("tokens")) == (0, 0)


async def test_a_tenant_has_one_share_of_pods_whatever_models_it_asks_them_for() -> None:
    setup = FlowSetup()
    models = ("m", "adapter-1", "adapter-2")
    backend = Backend(name="v", url="http://10.0.0.9:8000", models=models)
    setup.fleet.apply([DiscoveredBackend(backend)])
    for pod in setup.fleet:
        pod.estimates.slots.limit, pod.scraped_at = 1, inf
    placed, order = await setup.send(), list[str]()

    async def send(tenant: str, model: str) -> None:
        nonlocal placed
        placed = await setup.send(model=model, x_llm_d_inference_fairness_id=tenant)
        order.append(tenant)

    several = ["adapter-1", "adapter-2"] * 2
    sent = [("a", model) for model in several] + [("b", "m")] * 4
    tasks = [asyncio.create_task(send(*each)) for each in sent]
    await asyncio.sleep(0)
    for number in range(len(sent)):
        placed.end(time())
        await setup.until(lambda: len(order) > number)  # noqa: B023
    await asyncio.gather(*tasks)
    assert Counter(order[:4]) == {"a": 2, "b": 2}


async def test_a_clock_that_jumps_ends_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = FlowSetup()
    running = await setup.send()
    waiting = await setup.start()
    monkeypatch.setattr(control, "time", lambda: time() + 3600.0)
    await asyncio.sleep(0.05)
    assert not waiting.done()
    running.end(time())
    placed = await waiting
    assert placed.decision.held < 60.0


async def test_a_full_pod_is_asked_if_the_one_with_room_takes_nothing() -> None:
    setup = FlowSetup(u="unified", v="unified", w="unified")
    first, *_ = [await setup.send() for _ in range(3)]
    waiting = await setup.start()
    first.end(time())
    placed = await waiting
    assert placed.decode is first.decode
    others = {pod.address for pod in setup.fleet} - {first.decode.address}
    assert dict(placed.mutation.set)[wire.ALTERNATE_ENDPOINT] in others


async def test_a_match_is_not_all_that_pods_have_after_a_wait() -> None:
    knowledge = {"a": Knowledge.WHOLE, "b": Knowledge.PARTIAL, "c": Knowledge.NOTHING}
    match = PreciseMatch(64, BlockMatch({}), knowledge)
    assert match.is_whole("a")
    assert not match.aged().is_whole("a")
    assert [match.aged().cached(name) is None for name in "abc"] == [False, False, True]


async def test_a_fault_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    setup = FlowSetup()
    running = await setup.send()
    waiting = await setup.start()
    saturation = setup.flow._flows._saturation

    def fail(*_: object, **__: object) -> list[Pod]:
        raise RuntimeError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(saturation, "pods_with_room", fail)
        later = await setup.start()
        await asyncio.sleep(0.05)
    assert not waiting.done()
    running.end(time())
    (await waiting).end(time())
    (await later).end(time())
    assert (setup.held, setup.held_bytes) == (0, 0)


async def test_a_large_prompt_keeps_no_other_waiting() -> None:
    setup = FlowSetup()
    pod = setup["u"]
    pod.estimates.slots.limit = 9
    pod.estimates.capacity_tokens, pod.estimates._free_tokens = 10_000, 5_000
    pod.estimates.changed()
    await setup.send("hello")
    large = await setup.start("word " * 20_000)
    assert large.done(), "it waits in the engine, which has room for a part of it"


def busy_setup(itl: float | None) -> tuple[FlowSetup, bool]:
    """A pod that computes prompts for 90 % of its time; whether it has room for one more of a
    model with this objective."""
    setup, now = FlowSetup(), time()
    pod = setup["u"]
    pod.estimates.slots.limit, pod.in_flight = 9, 1
    pod.estimates.pace.fade(now)
    pod.estimates.pace.share = 0.9
    if itl is not None:
        setup.fleet.objectives = {"m": make_objective(None, itl, 0.9)}
    return setup, setup.flow._flows._saturation.has_room("m", 10.0, now)


def test_a_pod_whose_answers_would_be_late_has_no_room() -> None:
    step = FlowSetup()["u"].estimates.best_decode.step
    assert busy_setup(None)[1]
    setup, has_room = busy_setup(4 * step)
    assert not has_room
    assert busy_setup(20 * step)[1]
    # Without prompts it computes ever less.
    saturation = setup.flow._flows._saturation
    assert saturation.has_room("m", 10.0, time() + 60.0)
    # Another model's objective holds no request.
    assert saturation.has_room("another", 10.0, time())
    # Requests do not wait in vain for an objective that no answer could meet.
    assert busy_setup(0.5 * step)[1]
    # What is idle has room.
    setup["u"].in_flight = 0
    assert saturation.has_room("m", 10.0, time())


async def test_a_late_first_token_closes_no_pod() -> None:
    setup = FlowSetup()
    setup["u"].estimates.slots.limit = 9
    placed = await setup.send("hello", stream=True)
    assert placed.decision.path
    # Far beyond the time that was predicted for it.
    later = time() + 5.0
    figures = setup.fleet.figures.at(later).pods[0]
    assert wait_seconds(figures, later) > PATIENCE
    assert setup.flow._flows._saturation.has_room("m", 10.0, later)


async def test_a_cached_prefix_needs_no_room() -> None:
    setup = FlowSetup()
    pod = setup["u"]
    pod.estimates.slots.limit = 9
    await setup.send("word " * 500)
    pod.estimates.capacity_tokens, pod.estimates._free_tokens = 100_000, 300
    pod.estimates._placed_tokens = 0.0
    pod.estimates.changed()
    other = await setup.start("else " * 500)
    assert not other.done()
    other.cancel()
    await asyncio.wait([other])
    again = await setup.start("word " * 500 + "more")
    assert again.done()


@pytest.mark.parametrize("hinted", ["u", "v"])
async def test_a_hint_is_respected(hinted: str) -> None:
    setup = FlowSetup(u="unified", v="unified")
    full = setup["u"]
    full.in_flight, full.estimates.decodes = 1, 1
    hint = frozenset((setup[hinted].address or "",))
    body = json.dumps({"model": "m", "prompt": LONG}).encode()
    request = HttpRequest("POST", "/v1/completions", {}, hint)
    context = setup.preparer.prepare(request, body)
    assert context is not None
    entering = asyncio.create_task(context.__aenter__())
    await asyncio.sleep(0)
    assert entering.done() == (hinted == "v")
    if not entering.done():
        entering.cancel()
        await asyncio.wait([entering])
    else:
        await context.__aexit__(None, None, None)


async def test_a_peer_that_takes_nothing_blocks_nothing() -> None:
    setup = FlowSetup()
    running = await setup.send()
    waiting = await setup.start()
    setup.flow.elsewhere.learn("dead", Group("m", 9, is_split=False), Share(1))
    running.end(time())
    await waiting


async def test_nothing_is_displaced_in_vain() -> None:
    size = len(json.dumps({"model": "m", "prompt": LONG}))
    setup = FlowSetup(FlowSettings(enabled=True, max_bytes=2 * size, displace=True))
    await setup.send()
    waiting = [await setup.start(), await setup.start()]
    with refused(429, "flow_full", "rejected-saturated"):
        await setup.send(LONG * 3, priority="1")
    assert setup.held == 2
    for task in waiting:
        task.cancel()
