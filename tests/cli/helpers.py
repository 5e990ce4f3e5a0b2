"""Helpers of the commands' tests: the command as a process, and a fake API server."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

PODS_PATH = "/api/v1/namespaces/n/pods"


async def tandem(*args: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run `tandem ARGS`; returns exit status, stdout and stderr."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tandem_cli", *args),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=env,
    )
    out, err = await process.communicate()
    return process.returncode or 0, out.decode(), err.decode()


@asynccontextmanager
async def fake_api_server(
    folder: Path,
    pods: Sequence[object],
    proxy_path: str,
    proxied: Callable[[web.Request], Awaitable[web.Response]],
) -> AsyncIterator[str]:
    """Serve the pods of namespace `n`; yields the file name of a kubeconfig for it.

    `proxied` answers requests to `{pod}/proxy` + `proxy_path`, as pods would.
    """

    async def list_pods(_request: web.Request) -> web.Response:
        return web.json_response({"metadata": {"resourceVersion": "1"}, "items": pods})

    app = web.Application()
    app.add_routes(
        [
            web.get(PODS_PATH, list_pods),
            web.get(f"{PODS_PATH}/{{pod}}/proxy{proxy_path}", proxied),
        ]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    server = f"http://127.0.0.1:{runner.addresses[0][1]}"
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": server}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "n"}}],
        "current-context": "x",
    }
    file = folder / "kubeconfig"
    file.write_text(json.dumps(config))
    try:
        yield str(file)
    finally:
        await runner.cleanup()


def unavailable(message: str) -> web.Response:
    """The API server's answer if it cannot connect to the pod."""
    return web.json_response({"kind": "Status", "code": 503, "message": message}, status=503)
