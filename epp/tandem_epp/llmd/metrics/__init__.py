"""Metrics under llm-d's names, for its dashboards and autoscalers.

`table` lists the metrics of llm-d's EPP: those that mean the same here, and why the others are left
out. `requests` makes those of requests, `pool` those of pods; both compute them at the scrape. Read
`table` first. Tandem's own metrics are in `tandem_epp.metrics`; nothing here counts what they lack.
"""
