"""ext_proc's messages as plain values: what is read of Envoy's."""

import pytest
from google.protobuf.struct_pb2 import Struct

from tandem_contract import headers as wire
from tandem_epp.exchange import ResponseHeaders
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.codec import read_message
from tandem_epp.server.ext_proc.messages import BodyMode, RequestHeaders

from .test_servers import head


@pytest.mark.parametrize(
    ("namespace", "key", "value"),
    [
        (wire.METADATA_NAMESPACE, wire.SUBSET_HINT, "10.0.0.1:80, 10.0.0.2:80"),
        (wire.SUBSET_NAMESPACE, wire.SUBSET_KEY, ["10.0.0.1:80", "10.0.0.2:80"]),
    ],
)
def test_a_subset_hint_is_read_from_both_namespaces(
    namespace: str, key: str, value: str | list[str]
) -> None:
    message = head("/", end=True)
    hint = Struct()
    hint.update({key: value})
    message.metadata_context.filter_metadata[namespace].CopyFrom(hint)
    read = read_message(message)
    assert isinstance(read, RequestHeaders)
    assert read.request.subset == frozenset({"10.0.0.1:80", "10.0.0.2:80"})


def test_without_body_modes_full_duplex_is_assumed() -> None:
    message = pb.ProcessingRequest()
    message.request_headers.SetInParent()
    read = read_message(message)
    assert isinstance(read, RequestHeaders)
    assert read.request_mode is BodyMode.FULL_DUPLEX_STREAMED
    assert read.request.subset is None
    with pytest.raises(ValueError, match="without content"):
        read_message(pb.ProcessingRequest())


def response_head(status: bytes = b"503") -> pb.ProcessingRequest:
    """Response headers with the attributes that Envoy sends for our configuration."""
    message = pb.ProcessingRequest()
    headers = {":status": status, wire.ROUTING_PATH: b"unified", wire.RETRY_AFTER: b"3"}
    for name, value in headers.items():
        message.response_headers.headers.headers.add(key=name, raw_value=value)
    message.attributes["envoy.filters.http.ext_proc"].update(
        {wire.UPSTREAM_ADDRESS: "10.0.0.2:8000", wire.CODE_DETAILS: "via_upstream"}
    )
    return message


def test_what_answered_is_read_from_envoys_attributes() -> None:
    read = read_message(response_head())
    assert read == ResponseHeaders(
        timing=None,
        status=503,
        path="unified",
        retry_after="3",
        served="10.0.0.2:8000",
        details="via_upstream",
    )


def test_the_gateways_metadata_beats_the_upstream_address() -> None:
    message = response_head()
    served = Struct()
    served.update({wire.SERVED_ENDPOINT: "10.0.0.3:8000"})
    message.metadata_context.filter_metadata[wire.METADATA_NAMESPACE].CopyFrom(served)
    read = read_message(message)
    assert isinstance(read, ResponseHeaders)
    assert read.served == "10.0.0.3:8000"


def test_a_gateway_that_tells_nothing_of_the_backend() -> None:
    message = pb.ProcessingRequest()
    message.response_headers.SetInParent()
    # The pick itself, which Envoy returns in the same namespace, is not what served.
    picked = Struct()
    picked.update({wire.DESTINATION_ENDPOINT: "10.0.0.1:8000"})
    message.metadata_context.filter_metadata[wire.METADATA_NAMESPACE].CopyFrom(picked)
    read = read_message(message)
    assert isinstance(read, ResponseHeaders)
    assert (read.served, read.details, read.path) == (None, None, None)
