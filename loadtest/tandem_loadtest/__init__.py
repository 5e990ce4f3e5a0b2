"""Open-loop load: workloads, a client that measures, and the report.

This package has traces and synthetic workloads (`traces`, `conversations`: pure), the OpenAI client
with its drivers (`client`, over the pure `sse` and `answers`), counters read from metrics pages
(`scrape`) and the statistics (`report`: pure). It starts no server, prints nothing and does not
judge the results.

Errors: `traces.TraceError`, `scrape.ScrapeError`. A request that fails raises nothing: its
`calls.Result` has the reason.

Read `calls` first, then `client`.
"""
