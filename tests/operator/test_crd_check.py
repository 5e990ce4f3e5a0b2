from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from tandem_contract.labels import GROUP, SCHEMA_VERSION, VERSION
from tandem_kube.client import Api, connect
from tandem_operator.crd import KINDS, schema_version
from tandem_operator.runtime.crd_check import CrdsMissing, check_crds

KUBECONFIG = """\
clusters: [{{name: c, cluster: {{server: "{url}"}}}}]
users: [{{name: u, user: {{}}}}]
contexts: [{{name: x, context: {{cluster: c, user: u}}}}]
current-context: x
"""


@asynccontextmanager
async def server(
    folder: Path, status: int, version: str | None = None, served: Sequence[str] | None = None
) -> AsyncIterator[Api]:
    """An API server whose CRDs are all alike, and whose discovery has the kinds `served`; None: it
    is as closed as the CRDs."""
    annotations = {} if version is None else {SCHEMA_VERSION: version}
    body: dict[str, Any] = {"metadata": {"annotations": annotations}, "message": "no"}

    async def handle(request: web.Request) -> web.Response:
        if served is not None and request.path == f"/apis/{GROUP}/{VERSION}":
            if not served:
                return web.json_response({"message": "no such group"}, status=404)
            return web.json_response({"resources": [{"kind": kind} for kind in served]})
        return web.json_response(body, status=status)

    app = web.Application()
    app.router.add_get("/{path:.*}", handle)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    file = folder / "kubeconfig"
    file.write_text(KUBECONFIG.format(url=f"http://127.0.0.1:{runner.addresses[0][1]}"))
    async with await connect(file) as api:
        yield api
    await runner.cleanup()


async def test_crds_of_this_version_cause_no_warning(tmp_path: Path) -> None:
    async with server(tmp_path, 200, str(schema_version())) as api:
        assert not await check_crds(api)


@pytest.mark.parametrize("version", ["0", None, "draft"])
async def test_older_crds_cause_a_warning_with_the_command(
    tmp_path: Path, version: str | None
) -> None:
    async with server(tmp_path, 200, version) as api:
        lines = await check_crds(api)
    assert len(lines) == len(KINDS)
    assert all("kubectl apply --server-side" in line and "helm upgrade" in line for line in lines)


async def test_newer_crds_ask_for_a_newer_operator(tmp_path: Path) -> None:
    async with server(tmp_path, 200, str(schema_version() + 1)) as api:
        assert all("upgrade the operator" in line for line in await check_crds(api))


async def test_missing_crds_raise(tmp_path: Path) -> None:
    async with server(tmp_path, 404) as api:
        with pytest.raises(CrdsMissing, match=r"prefillpools\.tandem\.dev.*kubectl apply"):
            await check_crds(api)


async def test_unreadable_crds_cause_one_warning(tmp_path: Path) -> None:
    async with server(tmp_path, 403) as api:
        (line,) = await check_crds(api)
    assert "RBAC does not let the operator read CustomResourceDefinitions" in line


async def test_unreadable_crds_are_found_by_discovery(
    tmp_path: Path,
) -> None:
    async with server(tmp_path, 403, served=KINDS) as api:
        (line,) = await check_crds(api)
    assert "RBAC does not let the operator read CustomResourceDefinitions" in line


@pytest.mark.parametrize("served", [(), KINDS[:1]])
async def test_unreadable_crds_missing_from_discovery_raise(
    tmp_path: Path, served: Sequence[str]
) -> None:
    async with server(tmp_path, 403, served=served) as api:
        with pytest.raises(CrdsMissing, match=r"decodepools\.tandem\.dev.*kubectl apply"):
            await check_crds(api)
