"""Figures for estimates that are made before anything runs: what KV transfers are assumed to reach.

Not here: I/O, a clock, logging.
"""
