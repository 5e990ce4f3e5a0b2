"""The operator: custom resources as types, what is made from them, and the process that makes it.

    crd, observed, conditions, errors     the words all of it shares; `reference` documents the CRDs
    resources    YAML or API objects → typed pools, every choice made
    pods         a pool → the template of its pods
    planning     what is seen of a set → what to write, what to say
    routing      the pools behind an endpoint → Service, picker, Envoy, keys
    runtime      watches, queue, passes, writes, leadership; `main` has the flags

Each stands on those above it. All but `runtime` and `main` are pure and imported by others: no I/O
but the packaged CRDs, no clock, no Kubernetes client. docs/operator.md says who calls whom.

Read `resources.pools` first, then `pods.manifests`; for the operator `runtime.loops`, then
`planning.plan`. Errors are in `errors`.
"""
