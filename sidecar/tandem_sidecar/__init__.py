"""The proxy of a decode pod: prefill on a prefill pod, hand-off of the KV, decode on its engine.

    main ─► process ─► handoff ─► connectors, observability, security ─► bodies ─► http

- `http`: HTTP/1.1 for clients and engines
- `bodies`: parses and edits request bodies, and says which requests one engine must serve
- `security`: verifies plans, the allow-list, TLS certificates
- `connectors`: writes the two legs of a hand-off for each KV connector of vLLM
- `observability`: metrics, recent requests, log and spans
- `handoff`: one request, as a pure state machine and a driver that performs its actions
- `process`: start, drain, reload, workers and the admin port

It never chooses between pods (the EPP does) and talks to engines over HTTP only.
Read `handoff.machine` first, then `handoff.driver`.
"""
