"""A stream goes on at another engine after its own was killed, with the same tokens."""

from pathlib import Path

import pytest

from ...sidecar.real.client import Stream, open_response
from ...sidecar.real.engine import Engine
from ...sidecar.real.pair import call, expected_tokens
from .conftest import routed
from .test_failures import backends, busy_backend

pytestmark = [pytest.mark.component, pytest.mark.timeout(300)]
TOKENS = 60


@pytest.mark.parametrize("unified", [False, True])
async def test_a_stream_survives_the_death_of_its_engine(
    shared: dict[str, Engine], tmp_path: Path, unified: bool
) -> None:
    prefill = () if unified else ("prefill-0",)
    engines = await backends(shared, *prefill, "decode-0", "decode-1")
    async with routed(tmp_path / "router.yaml", engines, "--resume") as router:
        request = call(80 + unified, tokens=TOKENS, stream=True)
        async with open_response(router.http, router.url, request) as response:
            stream = Stream(response)
            await stream.wait_for_first_bytes()
            shared[await busy_backend(router, "decode")].kill()
            result = await stream.read_to_end()
        assert (result.status, result.error) == (200, "")
        assert result.tokens == expected_tokens(request)
