"""agentgateway's side of ext_proc, with its messages (agentgateway 1.4,
crates/agentgateway/src/http/ext_proc.rs and ext_proc/headers.rs).

agentgateway is written in Rust and is no Envoy. What differs from Envoy's messages:

- HTTP headers have `raw_value`; pseudo-headers, with `:scheme`, have `value` and come last.
- The body is sent at once, before the headers are answered. Its end may be a message of its own,
  without data, or the trailers.
- The response's messages all carry the endpoint that served, as metadata of `envoy.lb`.
- The destination is taken from the header only, which must be one `IP:port`.
"""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from tandem_contract import headers as wire
from tandem_epp.server.ext_proc import ext_proc_pb2 as pb
from tandem_epp.server.ext_proc.interface import SERVICE
from tandem_epp.server.ext_proc.messages import BodyMode


@dataclass
class ForwardedRequest:
    """What agentgateway would send to the pod, or answer itself."""

    headers: dict[str, str] = field(default_factory=dict)
    """Those that the EPP sets."""
    body: bytes = b""
    immediate: pb.ImmediateResponse | None = None

    @property
    def destination(self) -> tuple[str, int]:
        """Raises ValueError for what agentgateway does not accept as an address."""
        host, _, port = self.headers[wire.DESTINATION_ENDPOINT].rpartition(":")
        return host, int(port)


class Exchange:
    """One request's ext_proc stream."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def request(
        self, path: str, chunks: Sequence[bytes], *, trailers: bool = False
    ) -> ForwardedRequest:
        """Send a request's headers and body; returns once the EPP has answered all of it."""
        await self._call.write(_request_headers(path, has_body=bool(chunks)))
        for chunk in chunks:
            await self._call.write(pb.ProcessingRequest(request_body=pb.HttpBody(body=chunk)))
        if trailers:
            await self._call.write(pb.ProcessingRequest(request_trailers=pb.HttpTrailers()))
        elif chunks:
            end = pb.HttpBody(end_of_stream=True)
            await self._call.write(pb.ProcessingRequest(request_body=end))
        return await self._forwarded(has_body=bool(chunks))

    async def respond(self, served: str, chunks: Sequence[bytes]) -> bytes:
        """Send a pod's answer; returns what the EPP lets pass of its body."""
        headers = pb.HttpHeaders()
        headers.headers.headers.add(key="content-type", raw_value=b"text/event-stream")
        headers.headers.headers.add(key=":status", value="200")
        await self._call.write(_with_served(pb.ProcessingRequest(response_headers=headers), served))
        answer: pb.ProcessingResponse = await self._call.read()
        assert answer.WhichOneof("response") == "response_headers"
        passed = b""
        for number, chunk in enumerate(chunks, start=1):
            body = pb.HttpBody(body=chunk, end_of_stream=number == len(chunks))
            await self._call.write(_with_served(pb.ProcessingRequest(response_body=body), served))
            # Before the next chunk is sent: the EPP must not wait for more.
            streamed = (await self._call.read()).response_body.response.body_mutation
            passed += streamed.streamed_response.body
            assert streamed.streamed_response.end_of_stream == body.end_of_stream
        return passed

    async def _forwarded(self, *, has_body: bool) -> ForwardedRequest:
        request = ForwardedRequest()
        while True:
            answer: pb.ProcessingResponse = await self._call.read()
            match answer.WhichOneof("response"):
                case "immediate_response":
                    request.immediate = answer.immediate_response
                    return request
                case "request_headers":
                    assert not request.headers, "the headers are answered once"
                    for option in answer.request_headers.response.header_mutation.set_headers:
                        value = option.header.raw_value or option.header.value.encode()
                        request.headers[option.header.key] = value.decode()
                    if not has_body:
                        return request
                case "request_body":
                    assert request.headers, "the headers are answered before the body"
                    mutation = answer.request_body.response.body_mutation.streamed_response
                    request.body += mutation.body
                    if mutation.end_of_stream:
                        return request
                case "request_trailers":
                    return request
                case other:
                    raise AssertionError(other)


def _request_headers(path: str, *, has_body: bool) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    config = message.protocol_config
    config.request_body_mode = config.response_body_mode = BodyMode.FULL_DUPLEX_STREAMED
    message.request_headers.end_of_stream = not has_body
    headers = message.request_headers.headers.headers
    headers.add(key="content-type", raw_value=b"application/json")
    pseudo = {
        ":method": "POST" if has_body else "GET",
        ":scheme": "http",
        ":authority": "gateway.example",
        ":path": path,
    }
    for name, value in pseudo.items():
        headers.add(key=name, value=value)
    return message


def _with_served(message: pb.ProcessingRequest, served: str) -> pb.ProcessingRequest:
    fields = message.metadata_context.filter_metadata[wire.METADATA_NAMESPACE].fields
    fields[wire.SERVED_ENDPOINT].string_value = served
    return message


@asynccontextmanager
async def channel(port: int, authority: bytes) -> AsyncIterator[grpc.aio.Channel]:
    """A TLS connection to an EPP on this machine; agentgateway itself verifies no certificate."""
    options = [("grpc.ssl_target_name_override", "localhost")]
    credentials = grpc.ssl_channel_credentials(authority)
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", credentials, options) as connection:
        yield connection


def exchange(connection: grpc.aio.Channel) -> Exchange:
    """A stream for one request."""
    return Exchange(
        connection.stream_stream(
            f"/{SERVICE}/Process",
            request_serializer=pb.ProcessingRequest.SerializeToString,
            response_deserializer=pb.ProcessingResponse.FromString,
        )()
    )


def completion(prompt: str, model: str = "m") -> bytes:
    """The body of a completions request."""
    return json.dumps({"model": model, "prompt": prompt}).encode()
