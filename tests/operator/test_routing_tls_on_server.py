"""What docs/run/routing.md says to make the Secret of `routing.tls` with, on a real API server."""

import os
import re
import ssl
import subprocess
from pathlib import Path

import pytest

from tandem_contract.server_tls import ServerTls, mutual_client
from tandem_kube.resources import SECRETS

from ..cluster import tools
from ..cluster.control_plane import ControlPlane
from ..cluster.fixtures import fetched_module
from .operating import DECODE_POOLS, api_of, decode

pytestmark = pytest.mark.control_plane

_PAGE = Path(__file__).parents[2] / "docs" / "run" / "routing.md"
_NAME = "chat.inference.svc"
_CERT_MANAGER = "github.com/cert-manager/cert-manager@v1.19.1"


def blocks(language: str) -> list[str]:
    """The code of the section, in order."""
    section = _PAGE.read_text().partition("### Mutual TLS\n")[2].partition("\n### ")[0]
    return re.findall(rf"^```{language}\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)


def shake_hands(client: ssl.SSLContext, server: ssl.SSLContext, name: str | None) -> None:
    """Raises ssl.SSLError if one side refuses the other."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        client.wrap_bio(to_client, to_server, server_hostname=name),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    # Each side needs what the other has written, and the server the client's last flight.
    for side in sides * 3:
        try:
            side.do_handshake()
        except ssl.SSLWantReadError:
            continue
    assert sides[1].getpeercert()


async def test_the_openssl_commands_make_a_secret_that_all_sides_accept(
    crds: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    make, create = blocks("sh")
    environment = os.environ | {
        "PATH": f"{tools.path('kubectl').parent}:{os.environ['PATH']}",
        "KUBECONFIG": str(crds.kubeconfig),
        "KUBECACHEDIR": f"{crds.kubeconfig}.cache",
    }
    for script in (make, create.replace("-n inference", f"-n {namespace}")):
        subprocess.run(["sh", "-e", "-c", script], cwd=tmp_path, env=environment, check=True)
    server = ServerTls(tmp_path, ["h2"], is_mutual=True)
    # As Envoy checks it, and as strictly as newer Pythons do; then as the EPP calls sidecars.
    envoy = mutual_client(tmp_path)
    envoy.check_hostname = True
    envoy.verify_flags |= ssl.VERIFY_X509_STRICT
    shake_hands(envoy, server.context, _NAME)
    shake_hands(mutual_client(tmp_path), server.context, None)
    async with api_of(crds.kubeconfig) as api:
        secret = await api.get(SECRETS, "chat-tls", namespace)
        assert secret["data"].keys() == {"ca.crt", "tls.crt", "tls.key"}
        routing = {"endpoint": "chat", "tls": {"secretName": "chat-tls"}}
        pool = decode("d", namespace, prefillRef={"name": "p"}, routing=routing)
        await api.create(DECODE_POOLS, pool)


def test_cert_manager_accepts_the_manifests(crds: ControlPlane, go_program: Path) -> None:
    """Its definitions do: cert-manager itself does not run here."""
    definitions = fetched_module(go_program, _CERT_MANAGER) / "deploy" / "crds"
    for kind in ("certificates", "issuers"):
        file = f"--filename={definitions}/cert-manager.io_{kind}.yaml"
        crds.kubectl("apply", "--server-side", file)
        crds.wait_until_established(file)
    manifests = next(block for block in blocks("yaml") if "kind: Issuer" in block)
    manifests = manifests.replace("namespace: inference", "namespace: default")
    crds.kubectl("apply", "--dry-run=server", "--validate=strict", "--filename=-", input=manifests)
    assert f"dnsNames: [{_NAME}]" in manifests
