"""What the picker of a deployment answers by TLS and in clear text, and what its Envoy counted."""

import socket
import ssl
import urllib.request

import grpc
from cryptography import x509
from prometheus_client.parser import text_string_to_metric_families

from tandem_contract import ports
from tandem_epp.server.ext_proc.interface import SERVICE
from tandem_epp.server.http2 import frames, health
from tandem_epp.server.http2 import health_pb2 as pb
from tandem_operator.routing.envoy.bootstrap import STATS

from .router import STATISTICS

SECONDS = 30
_TARGET_NAME = "grpc.ssl_target_name_override"


def chosen_protocol(host: str) -> str | None:
    """The protocol that the picker's ext_proc port chooses by ALPN when a client offers HTTP/2."""
    client = ssl.create_default_context()
    # The certificate is self-signed, as llm-d's is.
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    client.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, ports.EPP_GRPC), SECONDS) as connection,
        client.wrap_socket(connection) as encrypted,
    ):
        return encrypted.selected_alpn_protocol()


def answer_in_clear(host: str) -> bytes:
    """All that the ext_proc port sends to a client that begins HTTP/2 without TLS, until it closes
    the connection. Raises TimeoutError if it does not."""
    received = b""
    with socket.create_connection((host, ports.EPP_GRPC), SECONDS) as connection:
        connection.sendall(frames.PREFACE + frames.settings({}))
        try:
            while data := connection.recv(4096):
                received += data
        except ConnectionResetError:
            pass
    return received


def health_of_ext_proc(host: str) -> int:
    """The status that gRPC's health service on the ext_proc port has for the service ext_proc."""
    pem = ssl.get_server_certificate((host, ports.EPP_GRPC), timeout=SECONDS).encode()
    names = x509.load_pem_x509_certificate(pem).extensions.get_extension_for_class(
        x509.SubjectAlternativeName
    )
    # grpcio verifies every certificate: this one is its own authority, under its own name.
    (name,) = names.value.get_values_for_type(x509.DNSName)
    credentials, options = grpc.ssl_channel_credentials(pem), [(_TARGET_NAME, name)]
    with grpc.secure_channel(f"{host}:{ports.EPP_GRPC}", credentials, options) as channel:
        check = channel.unary_unary(
            f"/{health.SERVICE}/Check",
            request_serializer=pb.HealthCheckRequest.SerializeToString,
            response_deserializer=pb.HealthCheckResponse.FromString,
        )
        return int(check(pb.HealthCheckRequest(service=SERVICE), timeout=SECONDS).status)


def envoy_counted(host: str, counter: str, cluster: str) -> float:
    """Envoy's counter of the upstream `cluster`, by its Prometheus name with `_total` behind it."""
    with urllib.request.urlopen(f"http://{host}:{STATISTICS}{STATS}", timeout=SECONDS) as page:
        families = text_string_to_metric_families(page.read().decode())
    # The parser adds `_total` to counters that lack it, as Envoy's do.
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == counter and sample.labels.get("envoy_cluster_name") == cluster
    )
