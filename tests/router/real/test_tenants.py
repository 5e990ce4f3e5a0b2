"""Two tenants before a router: both legs of a hand-off have the tenant's salt."""

from pathlib import Path

import pytest

from ...sidecar.real.engine import SERVED, Engine
from .conftest import Routed, routed

pytestmark = pytest.mark.component

PROMPT = list(range(300, 500))


async def ask(router: Routed, tenant: str) -> tuple[str, int]:
    """Path and cached tokens of a request."""
    body = {"model": SERVED, "prompt": PROMPT, "max_tokens": 2}
    headers = {"x-tenant": tenant}
    async with router.http.post(
        f"{router.url}/v1/completions", json=body, headers=headers
    ) as answer:
        usage = (await answer.json())["usage"]
        cached = int(usage["prompt_tokens_details"]["cached_tokens"])
        return answer.headers["x-continuum-routing-path"], cached


async def test_no_tenant_hits_what_another_has_sent(
    shared: dict[str, Engine], tmp_path: Path
) -> None:
    prefill, decode = shared["prefill-0"], shared["decode-0"]
    await prefill.up()
    await decode.up()
    backends = {"p": (prefill, "prefill"), "d": (decode, "decode")}
    salts = {"from_header": "x-tenant"}
    async with routed(tmp_path / "router.yaml", backends, cache_salt=salts) as router:
        for tenant in ("alice", "bob"):
            assert await ask(router, tenant) == ("prefill_then_decode", 0)
        for tenant in ("alice", "bob"):
            path, cached = await ask(router, tenant)
            assert path == "fast_decode"
            assert cached > 0
        await router.wait_until_idle(prefill, decode)
