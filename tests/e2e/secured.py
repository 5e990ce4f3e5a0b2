"""A set of pools behind mutual TLS: its Secret, and how it is renewed."""

import base64
import json
import ssl
from typing import Any

import trustme

from tandem_contract import labels, ports

from .site import SECONDS, TEAM, Site

PREFILL, DECODE = "secured-prefill", "secured"
MODEL = "secured-llama"
_SECRET = "secured-tls"
PODS = f"{labels.POOL} in ({PREFILL},{DECODE})"


def create(site: Site, ca: trustme.CA) -> None:
    """Create the Secret and the pools, and wait until they are ready."""
    renew(site, ca)
    spec: dict[str, Any] = {
        "model": {"name": MODEL, "source": {"tiny": {}}},
        "engine": {"type": "torch"},
        "replicas": 1,
    }
    decode = {
        "prefillRef": {"name": PREFILL},
        "replicas": 1,
        "routing": {"tls": {"secretName": _SECRET}},
    }
    _apply(site, _pool("PrefillPool", PREFILL, spec), _pool("DecodePool", DECODE, decode))
    pools = (f"prefillpool/{PREFILL}", f"decodepool/{DECODE}")
    site.wait_until_ready(*pools)
    # Until the EPP serves, Envoy sends requests on to pods, whose names it may not have resolved.
    timeout = f"--timeout={SECONDS}s"
    site.kubectl("wait", "--for=condition=RouterReady", timeout, f"decodepool/{DECODE}")


def renew(site: Site, ca: trustme.CA) -> None:
    """Write a new certificate of `ca` into the Secret."""
    issued = ca.issue_cert(f"{DECODE}.{TEAM}.svc")
    files = {
        "ca.crt": ca.cert_pem.bytes(),
        "tls.crt": b"".join(pem.bytes() for pem in issued.cert_chain_pems),
        "tls.key": issued.private_key_pem.bytes(),
    }
    data = {name: base64.b64encode(content).decode() for name, content in files.items()}
    metadata = {"name": _SECRET}
    _apply(site, {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": data})


def remove(site: Site) -> None:
    """Delete the pools, their pods and the Secret."""
    site.kubectl("delete", f"decodepool/{DECODE}", f"prefillpool/{PREFILL}", "--ignore-not-found")
    selector = f"--selector={PODS}"
    site.kubectl("wait", "--for=delete", "pod", selector, f"--timeout={SECONDS}s")
    site.kubectl("delete", f"secret/{_SECRET}", "--ignore-not-found")


def servers(site: Site) -> list[tuple[str, int]]:
    """Addresses of the sidecar and of the EPPs, which serve by TLS."""
    decode = site.get("pods", f"--selector={labels.POOL}={DECODE}")["items"]
    epp = f"--selector={labels.ENDPOINT}={DECODE},{labels.COMPONENT}=epp"
    epps = site.get("pods", epp)["items"]
    return [
        *((pod["status"]["podIP"], ports.SIDECAR) for pod in decode),
        *((pod["status"]["podIP"], ports.EPP_GRPC) for pod in epps),
    ]


def client(ca: trustme.CA) -> ssl.SSLContext:
    """A client with a certificate of `ca`, which checks no name."""
    context = ssl.create_default_context(cadata=ca.cert_pem.bytes().decode())
    context.check_hostname = False
    ca.issue_cert("client").configure_cert(context)
    return context


def _pool(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": name}
    return {"apiVersion": labels.API_VERSION, "kind": kind, "metadata": metadata, "spec": spec}


def _apply(site: Site, *objects: dict[str, Any]) -> None:
    listed = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    site.node.kubectl("apply", f"--namespace={TEAM}", "--filename=-", input=listed)
