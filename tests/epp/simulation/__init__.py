"""Simulated pods, workloads and routers, for benchmarks and tests of routing decisions.

`engine` is the model of a pod: batching, chunked prefill, a prefix cache. No router knows it.
`workload` makes requests, `routers` chooses pods (the real picker, and policies to compare with),
and `run` simulates requests on pods and measures them. Time is simulated: nothing here waits.
"""
