"""OpenTelemetry collectors: real receivers of OTLP, by HTTP and gRPC, that keep what they get."""

import asyncio
from typing import Self

import grpc
import grpc.aio
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Accepts spans, unless `status` or `hangs` is set."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.resource: dict[str, str] = {}
        self.status = 200
        self.hangs = False
        self.request_started = asyncio.Event()
        self.arrived = asyncio.Condition()
        self.released = asyncio.Event()

    async def take(self, request: web.Request) -> web.Response:
        self.request_started.set()
        if self.hangs:
            await self.released.wait()
        await self._keep(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(status=self.status)

    async def _keep(self, export: ExportTraceServiceRequest) -> None:
        for resource in export.resource_spans:
            about = resource.resource.attributes
            self.resource = {a.key: a.value.string_value for a in about}
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        async with self.arrived:
            self.arrived.notify_all()

    async def received(self, count: int) -> dict[str, Span]:
        """The spans by name, once there are `count`."""
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.spans) >= count)
        return {span.name: span for span in self.spans}

    async def __aenter__(self) -> Self:
        app = web.Application()
        app.router.add_post("/v1/traces", self.take)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1/traces"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.released.set()
        await self._runner.cleanup()


class GrpcCollector(Collector):
    """Takes spans by gRPC."""

    async def take_call(
        self, export: ExportTraceServiceRequest, _context: object
    ) -> ExportTraceServiceResponse:
        await self._keep(export)
        return ExportTraceServiceResponse()

    async def __aenter__(self) -> Self:
        self._server = grpc.aio.server()
        method = grpc.unary_unary_rpc_method_handler(
            self.take_call,
            request_deserializer=ExportTraceServiceRequest.FromString,
            response_serializer=ExportTraceServiceResponse.SerializeToString,
        )
        service = "opentelemetry.proto.collector.trace.v1.TraceService"
        handler = grpc.method_handlers_generic_handler(service, {"Export": method})
        self._server.add_generic_rpc_handlers((handler,))
        self.url = f"http://127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)
