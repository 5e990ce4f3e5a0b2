"""How many pods of what a workload needs, before anything of it runs: `tandem plan`. Pure.

    config.json ── model_shape ─┐
                                ├─ roofline ── seconds of a step ─┐
    gpus: what data sheets say ─┤                                 ├─ deployments ── search
                                └─ memory ──── tokens of KV ──────┘

`search` finds the cheapest deployment that meets the objectives, or the one that serves most with
given GPUs, by simulating it (`tandem_planner.simulation`). `estimate` says how exact what a
simulation rests on is. Not here: I/O, and the workload, which comes as requests.
"""
