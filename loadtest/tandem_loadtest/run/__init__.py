"""Drives a run: worker processes send sessions and measure, one parent process collects.

In a worker: `sender` begins sessions on time, open or closed loop, from a `look_ahead` of prepared
prompts; `turns` sends the turns of a session and makes records; `timers` is an exact timer;
`self_watch` measures how well the worker itself keeps up; `reference_check` compares answers;
`worker` is the process. What a worker is told is a `spec`, and `protocol` has the messages.

In the parent: `options` is what a benchmark is asked for, `workers` starts the processes
(`worker_link` is one of them, and accounts for the requests of one that died) and merges their
records, `verification` holds those that await a reference's verdict. `readiness`, `warm_up`,
`search`, `events` and `server_metrics` are parts of a benchmark, and `bench` is the whole.

Errors: `errors`. Read `spec`, then `sender`, then `bench`.
"""
