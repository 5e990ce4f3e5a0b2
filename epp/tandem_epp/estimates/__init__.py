"""What one pod is predicted to take for a request, learned from the requests before.

`pod_estimates.PodEstimates` is a pod's part: its queue of prefills (`prefill_queue`), the decodes
that run, one fit each of prefill, decode and transfer, and from all of them the `PodFigures` that
the planner's cost takes. `request_load.RequestLoad` counts one request on it and learns from its
answer. Samples come from three sources, the best one that a pod has: the engine's report
(`x-tandem-timing`), the time until the first token less the overhead that the engine's counters
tell (`own_requests`), and the differences of the engine's counters between two scrapes
(`own_requests` where they are of the EPP's own requests, else `engine_counters`). `kinds` gives
pods without samples the figures of alike pods. `fabric_fits` has what transfers from near and from
far pods take, `exposed_share` how much of that first tokens wait for. `cost_record` keeps what a
choice was made from.

Not here: which pod is chosen (`choice`), I/O, a clock. Times are Unix seconds. Read
`pod_estimates` first.
"""
