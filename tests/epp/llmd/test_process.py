"""`tandem-epp` started with llm-d's flags: TLS, probes, drain, and who may read metrics."""

import asyncio
import json
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import grpc.aio
import pytest
import trustme

from tandem_epp.server.http2 import health_pb2 as pb
from tandem_epp.server.http2.health import NOT_SERVING, SERVICE, SERVING
from tandem_operator.routing.envoy.clusters import EPP, Json

from ..envoy.test_with_envoy import post, running
from ..real import Backend, Epp, epp, serving, until
from ..server.http2.test_server import issue
from .chart_envoy import call_as_the_chart_does

pytestmark = pytest.mark.component


class ChartEnvoy:
    """Envoy as in llm-d's standalone chart."""

    def __init__(self) -> None:
        self._admin = 0

    def __call__(self, bootstrap: Json, _decode: list[Backend]) -> None:
        """Change the operator's configuration."""
        self._admin = bootstrap["admin"]["address"]["socket_address"]["port_value"]
        clusters = {each["name"]: each for each in bootstrap["static_resources"]["clusters"]}
        call_as_the_chart_does(clusters[EPP])
        # Sooner than in the chart, since a slow machine may fail the first check.
        (check,) = clusters[EPP]["health_checks"]
        check["interval"] = check["no_traffic_interval"] = "0.5s"

    async def figure(self, name: str) -> int:
        """The statistic `name` of the cluster of the EPP."""
        url = f"http://127.0.0.1:{self._admin}/stats?filter=^cluster.{EPP}.{name}$"
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            return int((await response.text()).rsplit(": ", 1)[1])


@pytest.mark.parametrize(
    "flags",
    [
        ("--secure-serving=true",),
        (
            "--secure-serving",
            "--tls-min-version=VersionTLS12",
            "--tls-cipher-suites=TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
        ),
    ],
)
async def test_requests_pass_by_a_self_signed_certificate(
    tmp_path: Path, flags: tuple[str, ...]
) -> None:
    envoy = ChartEnvoy()
    async with running(tmp_path, "FULL_DUPLEX_STREAMED", envoy, flags=flags) as stack:
        for backend in stack.decode:
            backend.release.set()
        answers = [await post(stack, {"model": "m", "prompt": f"{n}"}) for n in range(3)]
        assert {status for status, _, _ in answers} == {200}
        figures = await stack.epp.figures()
        decisions = [v for k, v in figures.items() if k.startswith("tandem_epp_decisions_total")]
        # Envoy lets requests pass without a decision when it cannot reach the EPP.
        assert sum(decisions) == len(answers)
        assert await envoy.figure("ssl.handshake") > 0

        async def is_healthy() -> bool:
            return await envoy.figure("health_check.success") > 0

        await until(is_healthy)


@asynccontextmanager
async def serving_one(folder: Path, *flags: str) -> AsyncIterator[Epp]:
    """An EPP with one backend of its configuration."""
    backend = Backend("a")
    async with serving(backend):
        config = folder / "router.yaml"
        entry = {"name": "a", "url": f"http://127.0.0.1:{backend.port}"}
        config.write_text(json.dumps({"backends": [entry]}))
        async with epp(config, *flags) as picker:
            yield picker


async def status(channel: grpc.aio.Channel, service: str) -> int:
    check = channel.unary_unary(
        f"/{SERVICE}/Check",
        request_serializer=pb.HealthCheckRequest.SerializeToString,
        response_deserializer=pb.HealthCheckResponse.FromString,
    )
    return int((await check(pb.HealthCheckRequest(service=service))).status)


async def test_the_health_port_answers_grpc_and_http_and_the_epp_serves_while_it_drains(
    tmp_path: Path,
) -> None:
    async with serving_one(tmp_path, "--drain-timeout=10m") as picker:
        health, ext_proc = (
            grpc.aio.insecure_channel(f"127.0.0.1:{port}") for port in (picker.health, picker.grpc)
        )
        async with health, ext_proc:
            for service in ("", "inference-extension", "readiness", "liveness"):
                assert await status(health, service) == SERVING
            assert await picker.ready(), "by HTTP/1.1"
            picker.process.terminate()

            async def is_draining() -> bool:
                return await status(health, "readiness") == NOT_SERVING

            await until(is_draining)
            assert not await picker.ready()
            assert await status(health, "liveness") == SERVING
            assert await status(ext_proc, "inference-extension") == NOT_SERVING
            picker.process.terminate()
            assert await picker.process.wait() == 0, "a second signal ends the wait"


async def test_metrics_by_tls_with_client_certificates(tmp_path: Path) -> None:
    authority = trustme.CA()
    certificates, trusted = tmp_path / "certificates", tmp_path / "ca.pem"
    certificates.mkdir()
    issue(authority, certificates)
    trusted.write_bytes(authority.cert_pem.bytes())
    flags = (f"--metrics-cert-dir={certificates}", f"--metrics-client-ca-file={trusted}")
    async with serving_one(tmp_path, *flags) as picker, aiohttp.ClientSession() as session:
        client = ssl.create_default_context(cafile=str(trusted))
        url = f"https://localhost:{picker.metrics}/metrics"
        with pytest.raises(aiohttp.ClientError):
            await session.get(url, ssl=client)
        authority.issue_cert("prometheus").configure_cert(client)
        async with session.get(url, ssl=client) as response:
            assert response.status == 200


async def test_a_log_of_json_names_flags_without_effect(tmp_path: Path) -> None:
    config = tmp_path / "router.yaml"
    config.write_text("backends: [{name: a, url: 'http://127.0.0.1:1'}]")
    ports = [
        word for flag in ("--listen", "--health", "--metrics") for word in (flag, "127.0.0.1:0")
    ]
    process = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-m",
            "tandem_epp",
            f"--config={config}",
            "--zap-encoder=json",
            "--zap-devel",
        ),
        *ports,
        stderr=asyncio.subprocess.PIPE,
    )
    assert process.stderr is not None
    line = json.loads(await process.stderr.readline())
    assert (line["level"], line["logger"]) == ("warning", "tandem_epp.llmd.options")
    assert line["msg"] == "--zap-devel has no effect: the log has one style"
    process.terminate()
    await process.wait()
