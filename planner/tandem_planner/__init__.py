"""Figures and predictions: what a request costs on a pod, measured or computed, in seconds.

`cost` defines the cost, term by term; `choice` finds the cheapest pods, from a `figure_table`, of
which `pod_costs` computes the sums, and from `groups` of pods that can exchange KV. `prefill_fit`,
`decode_fit` and `transfer` learn the rates of one engine (`learned_cost`, on `linear_fit`);
`kv_size` computes KV bytes from a model's config.json (`model_config`, `layer_kinds`); `fabrics`
says how close two pods are and what KV transfers are assumed to reach. Values in, values out.

`step_cost` is the seconds of an engine's step, `simulation` runs engines of such steps, and
`sizing` searches with it for the pods that a workload needs (`tandem plan`).

Not here: I/O, a clock, logging. Read `cost` first.
"""
