"""What Envoy talks to: bytes in, `exchange` values for the picker, and bytes out. Nothing else.

    ext_proc/   Envoy's external processing: two servers, and the state machine of one stream
    http2/      HTTP/2 and gRPC, for the server that does not use grpcio

What answers a request is behind `ext_proc.stream.RequestPicker`. Read `ext_proc.stream` first.
"""
