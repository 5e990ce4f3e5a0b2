"""The pools: custom resources as types, what is made from them, and the operator that makes it.

Pure, and imported by others: no I/O but the packaged CRDs, no clock, no Kubernetes client.

    crd, cel, schema     the CRD's defaults, structure and rules; Python repeats none of them
    reference            docs/reference/*.md from the CRDs
    objects, inherit, resolve     documents → valid objects → shared fields → every choice made
    spec, pools          the result as types: sets of pools, with revision and compat hash
    versions, tuning, connectors  what each vLLM has, what suits a role, how KV moves
    engines, containers, merge, manifests     pools → Pod JSON, the router's static configuration
    envoy                Envoy's bootstrap
    observed, plan, status, router     what is seen → what to write, what to say

The operator itself, which nobody imports: `main`, `service`, `acting`, `loops`, `cluster` and what
they use. docs/operator.md says who calls whom.

Read `pools` first, then `manifests`; for the operator `loops`, then `plan`. Errors are in `errors`.
"""
