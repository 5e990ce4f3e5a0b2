"""Simulated workloads and routers, for benchmarks and tests of routing decisions.

The pods are `tandem_planner.simulation`'s engines, of which no router knows. `workload` makes
requests; `policies`, `real_picker` and `replicas` of it choose pods, and so do `llmd_policy`,
`dynamo_policy` and `sglang_policy`, rebuilt from other projects, and `clairvoyant`, a bound; `run`
simulates requests on pods and measures them; `scenarios` and `returning` are whole experiments with
their figures, `regimes` loads and pods with which routers break. Time is simulated.
"""
