"""Measurements. Each script prints its figures and what they ran on; none is a test.

python -m benchmarks.handoff --json figures.json
make bench                                  every script, one table
"""
