"""Envoy's external processing (ext_proc): how requests come in and header changes go out.

`grpc_server` serves the protocol with grpcio, `messages` holds its messages as plain values, and
`stream` is the state machine of one request's stream. The picking itself belongs to `picker`:
`stream.RequestPicker` is the interface that this package expects of it. Read `stream` first.

`ext_proc_pb2.py` is generated from `ext_proc.proto` by `make generate`.
"""
