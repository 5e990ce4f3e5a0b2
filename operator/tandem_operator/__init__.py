"""The operator: parses PrefillPools and DecodePools, plans their pods and routers, writes both.

    crd, observed, conditions, errors     types shared by all; `reference` documents the CRDs
    resources    YAML or API objects → typed pools with all defaults resolved
    pods         a pool → its pod template
    planning     the observed state of a set → the writes to make, the status to report
    routing      the pools behind an endpoint → Service, EPP, Envoy, plan keys
    runtime      watches, cache, work queue, reconcilers, API writes, leader election
    main         the flags, and one replica from start to end

Each package imports only those above it. All but `runtime` and `main` are pure (no I/O but the
packaged CRDs, no clock, no Kubernetes client), so that the local runner and the command line can
use them too. docs/understand/operator.md follows a change through the modules.

Read `resources.pools` first, then `pods.manifests`; for the running operator
`runtime.reconcilers`, then `planning.plan`.
"""
