"""The endpoint picker (EPP): chooses the pods that serve a request, and whether it is split.

Envoy asks over ext_proc before it routes a request. The hand-off itself belongs to the sidecar, and
the desired state of the cluster to the operator.

    choice/         which pods serve a request, and whether it is split; read this first
    placement/      one request, from its body to its end; `placement.picker` decides on it
    exchange        a request and what becomes of it, as values between servers and picker
    request/        what a request's body says of the prompt
    backends/       what is known of the engines: discovery, scrapes, health, warm-up
    prefix/         which pod has which part of a prompt
    estimates/      what requests take, as the answers tell
    metrics/        counters, and gauges of pods
    replicas/       what the replicas of this EPP know together
    server/         what Envoy talks to: ext_proc, HTTP/2 and gRPC
    llmd/           llm-d's plugins, flags and metrics, for those who come from it
    process/        the running process: what it builds, serves and reads

Errors: a client's request is answered locally by `exchange.NotPlaced`. At start:
`DocumentError` with file and line, `server.ext_proc.interface.ListenError`.
"""
