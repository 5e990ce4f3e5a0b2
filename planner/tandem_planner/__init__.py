"""Figures and predictions: what a request costs on a pod, learned from measurements, in seconds.

`cost` defines the cost, term by term; `choice` finds the cheapest pods, from a
`figure_table`. `prefill_fit`, `decode_fit`
and `transfer` learn the rates of one engine (`learned_cost`, on `linear_fit`); `kv_size` computes
KV bytes from a model's config.json (`model_config`, `layer_kinds`); `fabrics` has what KV transfers
are assumed to reach. Values in, values out.

Not here: I/O, a clock, logging. Read `cost` first.
"""
