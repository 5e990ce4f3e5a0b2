from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from tandem_contract import metrics
from tandem_contract.paths import Role
from tandem_local import stack_metrics
from tandem_local.stack_metrics import scrape_stack
from tandem_local.state import PodState, State

pytestmark = pytest.mark.component

ENGINE = f"""
# TYPE {metrics.ENGINE_RUNNING} gauge
{metrics.ENGINE_RUNNING}{{engine="0",model_name="m"}} 2.0
{metrics.ENGINE_RUNNING}{{engine="1",model_name="m"}} 1.0
# TYPE {metrics.ENGINE_WAITING} gauge
{metrics.ENGINE_WAITING}{{model_name="m"}} 4.0
# TYPE {metrics.ENGINE_KV_USAGE} gauge
{metrics.ENGINE_KV_USAGE}{{model_name="m"}} 0.25
"""
SIDECAR = f"""
# TYPE disaggregated_requests counter
{metrics.REQUESTS}{{routing_path="unified"}} 3.0
{metrics.REQUESTS}{{routing_path="prefill_then_decode"}} 5.0
# TYPE {metrics.UNSERVED.removesuffix("_total")} counter
{metrics.UNSERVED}{{routing_path="unified"}} 2.0
# TYPE {metrics.PROCESS_START_TIME} gauge
{metrics.PROCESS_START_TIME} 1700000000.0
"""
DECISIONS = f"""
{metrics.EPP_DECISIONS}{{path="unified",reason="short"}} 7.0
{metrics.EPP_DECISIONS}{{path="refused",reason="no_backend"}} 4.0
"""


@pytest.fixture
async def url() -> AsyncIterator[str]:
    app = web.Application()
    for path, text in (("/engine", ENGINE), ("/sidecar", SIDECAR), ("/epp", DECISIONS)):

        async def page(_request: web.Request, text: str = text) -> web.Response:
            return web.Response(text=text)

        app.router.add_get(path, page)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    await runner.cleanup()


def pod(name: str, engine: str | None, sidecar: str | None = None) -> PodState:
    return PodState(name, Role.DECODE, "m", "127.1.1.1", True, 0, {}, engine, sidecar)


async def test_load_and_paths(url: str) -> None:
    pods = (pod("d0", f"{url}/engine", f"{url}/sidecar"), pod("d1", None, f"{url}/sidecar"))
    stack = await scrape_stack(State(1, "http://x", pods))
    # Those that no engine served, since it was still starting for example, are no unified ones.
    assert (stack.paths, stack.refused) == ({"unified": 2, "prefill_then_decode": 10}, 4)
    assert [load.counts_since for load in stack.pods] == [1_700_000_000.0] * 2
    assert (stack.pods[0].running, stack.pods[0].waiting, stack.pods[0].kv_usage) == (3, 4, 0.25)
    assert stack.pods[1].running is None


async def test_a_pod_that_does_not_answer_has_no_figures(url: str) -> None:
    pods = (pod("gone", "http://127.0.0.1:1/metrics"), pod("odd", f"{url}/nothing-here"))
    stack = await scrape_stack(State(1, "http://x", pods))
    assert [load.running for load in stack.pods] == [None, None]


async def test_what_the_epp_refused_is_refused(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    # The port of an EPP may be in use on the machine of a test.
    monkeypatch.setattr(stack_metrics, "_EPP_METRICS", f"{url}/epp?{{}}")
    stack = await scrape_stack(State(1, "http://x", (pod("epp", None),)))
    assert (stack.paths, stack.refused) == ({}, 4)
