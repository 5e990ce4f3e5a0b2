"""Pure arithmetic about serving: KV bytes, fabrics, what a split costs. Values in, values out.

Never here: I/O, a clock, a log line.
"""
