"""The sidecar as a process: start, drain, reload, workers and the admin port.

Read `run` first (one process), then `wiring` (what it consists of), then `supervisor` (several).
"""
