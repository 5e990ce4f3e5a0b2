"""Envoy's external processing (ext_proc): how requests come in and header changes go out.

`stream` is the state machine of one request's stream, and `messages` holds its messages as plain
values. Two servers drive it (`interface`): `grpc_server` on grpcio and `http2_server` on our own
HTTP/2. `codec` turns protobuf's messages into values and back; `wire_headers`, `wire_bodies` and
`wire_answers` do it without protobuf's objects, for the messages that are most or largest. The
picking itself belongs to `picker`: `stream.RequestPicker` is the interface that this package
expects of it. Read `stream` first.

`access_log` receives what ext_proc does not show: answers that break off.

`make generate` makes `ext_proc_pb2.py` and `access_log_pb2.py` from the `.proto` files.
"""
