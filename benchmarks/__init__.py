"""Benchmarks, which are no tests: each script prints its figures and the machine it ran on.

python -m benchmarks.handoff --json figures.json
make bench                                  every script, one table
"""
