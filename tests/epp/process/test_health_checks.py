"""Health checks of a running EPP, as its configuration file says."""

import json
from pathlib import Path

import pytest

from ..real import Backend, epp, serving, until

pytestmark = pytest.mark.component


def router_yaml(*backends: Backend, **sections: object) -> str:
    listed = [{"name": b.name, "url": f"http://127.0.0.1:{b.port}"} for b in backends]
    return json.dumps({"backends": listed, **sections})


async def test_a_backend_whose_engine_failed_gets_no_requests(tmp_path: Path) -> None:
    good, bad = Backend("good"), Backend("bad")
    # Its engine is out of memory; its API server still serves the metrics.
    bad.fails = True
    config = tmp_path / "router.yaml"
    async with serving(good, bad):
        config.write_text(router_yaml(good, bad))
        async with epp(config) as picker:
            await until(lambda: picker.serves("good", "bad"))
            checks = {"path": "/health", "interval": "100ms", "healthy_threshold": 2}
            config.write_text(router_yaml(good, bad, health_checks=checks))
            await until(lambda: picker.serves("good"))
            bad.received.clear()
            bad.fails = False
            await until(lambda: picker.serves("good", "bad"))
    assert [request.path for request in bad.received[:2]] == ["/health"] * 2
