"""The endpoint picker (EPP): chooses the pods that serve a request, and whether it is split.

Envoy asks over ext_proc before it routes a request. The hand-off itself belongs to the sidecar, and
the desired state of the cluster to the operator.

    picker          one request, from its body to the headers that Envoy sets; read this first
    ext_proc/       Envoy's protocol: its two servers and the state machine of one stream
    http2/          HTTP/2 and gRPC, for the server that does not use grpcio
    scheduling/     the choice of pods: scheduler, filters, scorers, pickers, decider, plugins
    backends/       what is known of the engines: discovery, scrapes, prefix index, warm-up
    peers/          the channel between the replicas of this EPP
    service         start and stop of the process; its `servers`, and where `discovery` finds pods
    llmd/           the flags of llm-d's EPP, beside those of `main`

Errors: a client's request is answered locally by `ext_proc.stream.LocalReply`. At start:
`DocumentError` with file and line, `ext_proc.interface.ListenError`.
"""
