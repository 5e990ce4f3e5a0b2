"""Envoy's external processing (ext_proc): how requests come in and header changes go out.

`grpc_server` serves the protocol with grpcio, `messages` holds its messages as plain values, and
`stream` is the state machine of one request's stream. The picking itself belongs to `picker`:
`stream.RequestPicker` is the interface that this package expects of it. Read `stream` first.

`access_log` receives what ext_proc does not show: answers that break off.

`make generate` makes `ext_proc_pb2.py` and `access_log_pb2.py` from the `.proto` files.
"""
