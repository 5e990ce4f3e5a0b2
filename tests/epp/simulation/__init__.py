"""Simulated pods, workloads and routers, for benchmarks and tests of routing decisions.

`engine` is the model of a pod: batching, chunked prefill, KV blocks (`block_pool`), loads from
external storage (`store`). No router knows it. `workload` makes requests; `policies`,
`real_picker` and `replicas` of it choose pods, and so do `llmd_policy`, `dynamo_policy` and
`sglang_policy`, rebuilt from other projects, and `clairvoyant`, a bound; `run` simulates requests
on pods and measures them; `scenarios` and `returning` are whole experiments with their figures,
`regimes` loads and pods with which routers break. Time is simulated: nothing here waits.
"""
