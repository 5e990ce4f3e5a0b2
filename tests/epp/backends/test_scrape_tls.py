"""Backends that serve by TLS: how metrics-data-source has them scraped."""

import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import trustme

from tandem_contract.config import Backend as BackendConfig
from tandem_contract.documents import DocumentError, parse_documents
from tandem_contract.paths import Role
from tandem_contract.server_tls import mutual_client
from tandem_epp.backends.fleet import Fleet
from tandem_epp.backends.pods import DiscoveredBackend, Pod
from tandem_epp.backends.scrape import Scraper
from tandem_epp.backends.scrape_settings import ScrapeSettings
from tandem_epp.llmd.plugins.explain import explain
from tandem_epp.process.configuration import read

from ...cluster.control_plane import ControlPlane
from ...sidecar.processes import sidecar
from ..real import Backend, serving, starting_epp, until
from .cluster_pods import Pods
from .test_kubernetes_discovery import flags

HOST = "127.0.0.1"


def server_tls(ca: trustme.CA, *, clients: trustme.CA | None = None) -> ssl.SSLContext:
    """For a server on `HOST`; `clients`: whose certificates it requires."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert(HOST).configure_cert(context)
    if clients is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        clients.configure_trust(context)
    return context


def settings_of(**parameters: object) -> ScrapeSettings:
    """The settings of a configuration that lists metrics-data-source with these parameters."""
    plugin = {"type": "metrics-data-source", "parameters": parameters}
    text = json.dumps({"plugins": [plugin]}, indent=1)
    documents = parse_documents(text, "router.yaml")
    return read(documents, "router.yaml", {}, lists_backends=None).routing.scheduling.scraping


@asynccontextmanager
async def scraped(
    url: str, settings: ScrapeSettings, role: Role = Role.UNIFIED
) -> AsyncIterator[Pod]:
    """The pod at `url`, which is scraped."""
    fleet = Fleet()
    scraper = Scraper(fleet)
    scraper.settings = settings
    fleet.apply([DiscoveredBackend(BackendConfig("a", url, role))])
    scraper.sync()
    try:
        (pod,) = fleet
        yield pod
    finally:
        await scraper.close()


async def was_answered(pod: Pod) -> bool:
    return pod.gauges is not None


@pytest.mark.parametrize("is_verified", [True, False])
async def test_certificates_are_verified_if_the_configuration_says_so(
    tmp_path: Path, is_verified: bool
) -> None:
    ca, other, backend = trustme.CA(), trustme.CA(), Backend("a")
    trusted, untrusted = tmp_path / "ca.pem", tmp_path / "other.pem"
    trusted.write_bytes(ca.cert_pem.bytes())
    untrusted.write_bytes(other.cert_pem.bytes())
    async with serving(backend, tls=server_tls(ca)):
        url = f"https://{HOST}:{backend.port}"
        good = settings_of(insecureSkipVerify=not is_verified, caCertPath=str(trusted))
        async with scraped(url, good) as pod:
            await until(lambda: was_answered(pod))
        bad = settings_of(insecureSkipVerify=not is_verified, caCertPath=str(untrusted))
        async with scraped(url, bad) as pod:
            if is_verified:
                await until(lambda: holds(not pod.healthy))
                assert pod.gauges is None
            else:
                await until(lambda: was_answered(pod))


async def test_an_engine_that_requires_a_certificate_gets_the_epps(tmp_path: Path) -> None:
    ca, backend = trustme.CA(), Backend("a")
    own = ca.issue_cert("epp.test")
    certificate, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    certificate.write_bytes(b"".join(pem.bytes() for pem in own.cert_chain_pems))
    key.write_bytes(own.private_key_pem.bytes())
    async with serving(backend, tls=server_tls(ca, clients=ca)):
        url = f"https://{HOST}:{backend.port}"
        async with scraped(url, settings_of()) as pod:
            await until(lambda: holds(not pod.healthy))
        settings = settings_of(clientCertPath=str(certificate), clientKeyPath=str(key))
        async with scraped(url, settings) as pod:
            await until(lambda: was_answered(pod))


async def test_mutual_tls_is_for_sidecars_and_engines_have_what_the_configuration_says(
    tmp_path: Path,
) -> None:
    endpoints_ca, engines_ca = trustme.CA(), trustme.CA()
    own, trusted = endpoints_ca.issue_cert("chat.ns.svc"), tmp_path / "engines.pem"
    (tmp_path / "ca.crt").write_bytes(endpoints_ca.cert_pem.bytes())
    (tmp_path / "tls.crt").write_bytes(own.cert_chain_pems[0].bytes())
    (tmp_path / "tls.key").write_bytes(own.private_key_pem.bytes())
    trusted.write_bytes(engines_ca.cert_pem.bytes())
    file = settings_of(scheme="https", insecureSkipVerify=False, caCertPath=str(trusted))
    settings = replace(file, sidecars_tls=mutual_client(tmp_path))
    servers = (
        (Role.DECODE, server_tls(endpoints_ca, clients=endpoints_ca)),
        (Role.PREFILL, server_tls(engines_ca)),
    )
    for role, tls in servers:
        async with serving(backend := Backend("a"), tls=tls):
            plain = BackendConfig("a", f"http://{HOST}:{backend.port}", role)
            url = settings.with_scheme(DiscoveredBackend(plain), to_sidecars=True).backend.url
            async with scraped(url, settings, role) as pod:
                await until(lambda pod=pod: was_answered(pod))


async def test_another_port_than_the_sidecars_has_no_mutual_tls() -> None:
    settings = replace(settings_of(port=8200), sidecars_tls=ssl.create_default_context())
    plain = DiscoveredBackend(BackendConfig("a", "http://10.0.0.1:8000", Role.DECODE))
    backend = settings.with_scheme(plain, to_sidecars=True).backend
    page = settings.metrics_url(backend.url)
    assert (backend.url, page) == ("https://10.0.0.1:8000", "http://10.0.0.1:8200/metrics")
    assert settings.tls_for(backend, page) is settings.tls
    assert settings.tls_for(backend, f"{backend.url}/health") is settings.sidecars_tls


@pytest.mark.component
@pytest.mark.control_plane
async def test_pods_behind_tls_are_backends_and_get_their_first_hand_off(
    control_plane: ControlPlane, pods: Pods, tmp_path: Path
) -> None:
    """The decode pod is a real sidecar with a certificate that it made at its start."""
    engine, prefill = Backend("d1"), Backend("p1")
    config = tmp_path / "router.yaml"
    source = {"type": "metrics-data-source", "parameters": {"scheme": "https"}}
    config.write_text(json.dumps({"disaggregated_serving": {"enabled": True}, "plugins": [source]}))
    async with (
        serving(engine),
        serving(prefill, tls=server_tls(trustme.CA())),
        sidecar("--secure-proxy=true", f"--engine=http://{HOST}:{engine.port}") as proxy,
    ):
        await pods.create(Backend("d1", proxy.listen.port), "decode")
        await pods.create(prefill, "prefill")
        options = (*flags(pods.namespace), "--warm-up")
        started = starting_epp(config, *options, KUBECONFIG=str(control_plane.kubeconfig))
        async with started as epp:
            await until(epp.ready)
            await until(lambda: epp.serves("d1", "p1"))

            async def was_warmed() -> bool:
                figures = await epp.figures()
                # The fake engine takes no hand-off, so the sidecar falls back.
                return any(
                    value
                    for name, value in figures.items()
                    if name.startswith("tandem_epp_warmups_total") and "unreachable" not in name
                )

            await until(was_warmed)
            assert any(request.path == "/v1/completions" for request in engine.received)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"caCertPath": "/nonexistent"}, "caCertPath: /nonexistent: No such file"),
        ({"caCertPath": __file__}, "caCertPath: .*: no certificate or key in PEM"),
        ({"clientCertPath": "/x"}, "clientCertPath and clientKeyPath need each other"),
        ({"clientCertPath": "/x", "clientKeyPath": "/y"}, "clientCertPath: /x, /y: No such file"),
        ({"scheme": "ftp"}, "scheme"),
        ({"port": 0}, "port"),
        ({"path": "metrics"}, "path"),
        ({"shceme": "https"}, "shceme"),
    ],
)
def test_unusable_parameters_are_refused_with_their_line(
    parameters: dict[str, object], message: str
) -> None:
    with pytest.raises(DocumentError, match=rf"router.yaml:\d+: plugins\[0\].*{message}"):
        settings_of(**parameters)


@pytest.mark.parametrize(
    ("settings", "backend", "metrics", "requests"),
    [
        ({}, "http://10.0.0.1:8000", "http://10.0.0.1:8000/metrics", "http://10.0.0.1:8000"),
        (
            {"scheme": "https"},
            "http://[::1]:8000",
            "https://[::1]:8000/metrics",
            "https://[::1]:8000",
        ),
        (
            {"scheme": "https", "port": 9090, "path": "/m"},
            "http://[::1]:8000",
            "https://[::1]:9090/m",
            "http://[::1]:8000",
        ),
        ({"port": 9090}, "http://10.0.0.1:8000", "http://10.0.0.1:9090/metrics", ""),
    ],
)
def test_urls_of_pods(
    settings: dict[str, object], backend: str, metrics: str, requests: str
) -> None:
    scraping = settings_of(**settings)
    plain = DiscoveredBackend(BackendConfig("a", backend, http2=True))
    discovered = scraping.with_scheme(plain)
    assert discovered.backend.url == (requests or backend)
    assert discovered.backend.http2 == discovered.backend.url.startswith("http:")
    assert scraping.metrics_url(discovered.backend.url) == metrics


def test_check_config_says_how_metrics_are_read() -> None:
    plugin = {"type": "metrics-data-source", "parameters": {"scheme": "https"}}
    documents = parse_documents(json.dumps({"plugins": [plugin]}), "router.yaml")
    configuration = read(documents, "router.yaml", {}, lists_backends=None)
    line = "metrics: https, the port of requests, /metrics, certificates not verified"
    assert line in explain(configuration.routing, configuration.router.health_checks).splitlines()


async def holds(condition: bool) -> bool:
    return condition
