"""The endpoint picker: decides which pods serve a request, and by which path.

Envoy asks over ext_proc before it routes. Here belong the stream logic (`stream`), the reading of
a request (`request`), the rating of backends (`scheduling`), the decision to split (`decide`), and
what feeds them: the prefix index, discovery, scrapes. Never: the hand-off itself, which is the
sidecar's, nor what the cluster should look like, which is the operator's.

Read `picker` first, one request from its body to its headers; then `stream`, when Envoy is told.

Errors a client sees: `stream.Refused`, raised with its answer. At start: `DocumentError` with file
and line, `grpc_server.ListenError`.
"""
