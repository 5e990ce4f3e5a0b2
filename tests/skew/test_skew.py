"""An old sidecar under a new EPP and the reverse, with real Envoy and real engines.

Both are upgraded at different times: the EPP with its Deployment, a sidecar with its engine's pod.
"""

import json
from contextlib import AsyncExitStack
from pathlib import Path

import aiohttp
import pytest

from tandem_contract import metrics
from tandem_contract.commandline import HostPort

from ..epp.real import Epp, envoy, envoy_settings, epp, until
from ..sidecar.processes import sidecar
from ..sidecar.real.client import ClientResult, ask
from ..sidecar.real.engine import SERVED, Engine
from ..sidecar.real.pair import call, expected_tokens

pytestmark = pytest.mark.component
SPLIT = "prefill_then_decode"


def configuration(
    decode: HostPort, prefill: HostPort, *, always_splits: bool, resumes: bool
) -> str:
    backends = [
        {"name": f"{role}-0", "role": role, "url": f"http://{address}", "models": [SERVED]}
        for role, address in (("decode", decode), ("prefill", prefill))
    ]
    decider = "always-disagg-pd-decider" if always_splits else "prefix-based-pd-decider"
    parameters = {} if always_splits else {"parameters": {"nonCachedTokens": 100_000}}
    plugins = [{"type": "max-score-picker"}, {"type": decider, **parameters}]
    # The plan of a new EPP then has timeouts, and asks for resumed streams: an old sidecar ignores
    # what it does not know.
    timeouts = {"prefill_timeout": "30s", "kv_transfer_timeout": "10s"}
    serving = {"enabled": True, "fallback_to_unified": False, **timeouts}
    sections = {"plugins": plugins, "disaggregated_serving": serving, "backends": backends}
    # An old EPP refuses the section; the operator writes it only if a pool asks for it.
    return json.dumps({**sections, "resume": {"enabled": True}} if resumes else sections)


@pytest.mark.parametrize("has_plan", [True, False])
@pytest.mark.parametrize("always_splits", [True, False])
@pytest.mark.parametrize("old", ["sidecar", "epp"])
async def test_requests_pass_between_two_versions(
    older_packages: str,
    tmp_path: Path,
    decode: Engine,
    prefill: Engine,
    old: str,
    always_splits: bool,
    has_plan: bool,
) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "20260101T000000Z").write_bytes(b"0123456789abcdef0123456789abcdef")
    flags = ("--plan-key-dir", str(keys)) if has_plan else ()
    allow = ("--prefill-allow", "127.0.0.0/8", "--pod-name", "decode-0")
    path = f"PYTHONPATH={older_packages}"
    async with AsyncExitStack() as stack:
        before_decode = await stack.enter_async_context(
            sidecar(
                *("--engine", decode.url, *allow, *flags),
                under=("env", path) if old == "sidecar" else (),
            )
        )
        config = tmp_path / "router.yaml"
        pair = before_decode.listen, prefill.address
        resumes = old == "sidecar"
        config.write_text(configuration(*pair, always_splits=always_splits, resumes=resumes))
        environment = {"PYTHONPATH": older_packages} if old == "epp" else {}
        picker = await stack.enter_async_context(epp(config, *flags, **environment))
        settings = envoy_settings(picker.grpc, (str(before_decode.listen),))
        url = await stack.enter_async_context(envoy(tmp_path, settings))
        prompts = await prefill.figure(metrics.ENGINE_PROMPT_TOKENS)
        for stream in (False, True):
            request = call(500 + 20 * always_splits + 10 * has_plan + stream, stream=stream)
            result = await send(url, request)
            assert (result.status, result.error) == (200, "")
            assert result.path == (SPLIT if always_splits else "unified")
            assert result.tokens == expected_tokens(request)
        used = await prefill.figure(metrics.ENGINE_PROMPT_TOKENS) > prompts
        assert used == always_splits
        # The EPP learns from the sidecar's timing header, whichever of them is older.
        await until(lambda: nothing_in_flight(picker))


async def nothing_in_flight(picker: Epp) -> bool:
    return await picker.in_flight() == 0


async def send(url: str, request: object) -> ClientResult:
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout) as http:
        return await ask(http, url, request)  # type: ignore[arg-type]
