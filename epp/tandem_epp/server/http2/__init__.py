"""A server for HTTP/2 (RFC 9113) and gRPC: what ext_proc needs of them, and nothing else.

    bytes ──► connection ──events──► session ──messages──► a Handler of the caller
    bytes ◄── connection ◄─────────── session ◄──────────── Call.send, Call.finish

`connection` is the protocol: a pure state machine, bytes in, events and bytes out; times are passed
in. `state` is what it knows, `control` handles its frames other than DATA, `sending` its output,
and `stream` is one stream with its windows. They use `frames` (the wire format), `headers` (HPACK
and the rules for fields), `limits` (every bound, with its reason) and `errors` (one tree).
`session` maps streams to gRPC calls by the framing in `grpc`, and is pure too. `server` does the
I/O: sockets, TLS, back-pressure and the end of the process; `tls` loads its certificate and tells
TLS from clear text, and `health` answers probes by gRPC, HTTP/2 and HTTP/1.1. Read `connection`
first.

Left out on purpose: clients, server push, the upgrade from HTTP/1.1, priorities, compression of
messages and gRPC reflection.

Two choices make it fast. All frames that answer the bytes of one read event leave in one write. And
the server announces a header table of size 0: each header block then stands alone, so that equal
blocks, which a gateway sends for every request, are decoded once and looked up afterwards.
"""
