"""The EPP's own metrics: counters of what happened, and gauges that are computed at each scrape.

`counters` has what is counted and what pods show, and `faults` contains the EPP's own bugs. Metrics
under llm-d's names are in `llmd.metrics`.
"""
