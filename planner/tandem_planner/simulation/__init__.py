"""Simulated engines and the requests on them. Time is simulated: nothing here waits. Deterministic.

`loop` is the only loop of events: requests arrive, a router chooses pods (`routers`), which compute
and answer. `engine` is the model of a pod: batching, chunked prefill, KV blocks (`block_pool`),
loads from external storage (`store`) and KV that comes over a `link`; `work` is a request, and the
same on a pod. How long a step takes, `step_cost` says. `measures` is what clients saw.

`tandem plan` searches with these; the benchmarks of routing put the real picker and rivals before
the same engines (tests/epp/simulation).
"""
