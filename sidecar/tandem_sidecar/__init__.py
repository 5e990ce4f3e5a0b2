"""The decode pod's proxy: runs the hand-off, prefill there, KV across, decode here.

    main ─► process ─► handoff ─► connectors, seeing, trust ─► bodies ─► http

`http` is the data path's HTTP/1.1, `bodies` what a request says and may not say, `trust` whom to
believe, `connectors` how the KV moves, `seeing` what operators see of it, `handoff` one request as
a pure state machine and its driver, `process` everything around. Never: a choice between pods,
which is the EPP's, nor anything of an engine but its HTTP interface.

Read `handoff.machine` first, then `handoff.driver`.
"""
