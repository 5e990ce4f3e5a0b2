"""Open-loop load: what to send, a client that measures, and the report.

Here belong traces and made-up workloads (`traces`, `conversations`: pure), the OpenAI client with
its drivers (`client`, over the pure `sse` and `answers`), counters read from metrics pages
(`scrape`) and the figures (`report`: pure). Never: starting a server, printing, deciding what is
fast enough.

Errors a caller meets: `traces.TraceError`, `scrape.ScrapeError`. A request that fails raises
nothing: its `calls.Result` says why.

Read `calls` first, then `client`.
"""
