"""Simulated pods, workloads and routers, for benchmarks and tests of routing decisions.

`engine` is the model of a pod: batching, chunked prefill, KV blocks (`block_pool`), loads from
external storage (`store`). No router knows it. `workload` makes requests; `policies`,
`real_picker` and `replicas` of it choose pods; `run` simulates requests on pods and measures them;
`scenarios` and `returning` are whole experiments with their figures. Time is simulated: nothing
here waits.
"""
