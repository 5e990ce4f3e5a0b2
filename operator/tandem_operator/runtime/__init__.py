"""The operator that runs: watches, queue, passes, writes, leadership. The only I/O of this package.

Read `loops` first, then `cluster`, `known`, `acting`.
"""
