"""Simulated engines and the requests on them. Time is simulated: nothing here waits. Deterministic.

`engine` is the model of a pod: batching, chunked prefill, KV blocks (`block_pool`), loads from
external storage (`store`) and KV that comes over a `link`; `work` is a request on a pod. How long a
step takes, `step_cost` says. `cluster` sends requests to pods, co-located or split, and `measures`
what they saw. `tandem plan` searches with these; the benchmarks of routing put the real picker and
rivals before the same engines (tests/epp/simulation).
"""
