"""Plugins of conformance tests behind real Envoy: the request names its endpoint, and the response
the one that served."""

from pathlib import Path

import pytest

from tandem_operator.routing.envoy.http_filters import BodyMode

from .test_with_envoy import MODES, post, running

pytestmark = pytest.mark.component

PLUGINS = ("header-based-testing-filter", "destination-endpoint-served-verifier")


@MODES
async def test_a_request_goes_where_its_header_says(tmp_path: Path, mode: BodyMode) -> None:
    async with running(tmp_path, mode, plugins=PLUGINS) as stack:
        body = {"model": "m", "prompt": "x"}
        for backend in stack.decode:
            address = f"127.0.0.1:{backend.port}"
            status, _, headers = await post(stack, body, **{"test-epp-endpoint-selection": address})
            assert (status, headers["x-served-by"]) == (200, backend.name)
            assert headers["x-conformance-test-served-endpoint"] == address
        status, _, headers = await post(stack, body)
        served = headers["x-conformance-test-served-endpoint"]
        assert (status, served) in {(200, f"127.0.0.1:{each.port}") for each in stack.decode}
        status, _, _ = await post(stack, body, **{"test-epp-endpoint-selection": "127.0.0.1:1"})
        assert status == 503
