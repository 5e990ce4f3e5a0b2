"""The load generator: what to send, sending and measuring it, and the report.

    run        drives worker processes through a whole benchmark and collects their records
    client     sends one request and measures it: HTTP, server-sent events, the five APIs
    workload   what is sent and when (pure)
    figures    statistics of the records, the report's model, comparison of reports (pure)
    html       the report as one web page (pure)
    drivers, scrape   what `tandem demo` needs: a small open loop, and counters of engines

`calls` has the values that workload and client share, `records` those that client and figures
share. Nothing here prints, serves or judges: the commands in `tandem_cli` do.

A request that fails raises nothing: its `calls.Result`, and its `records.Record`, say how it ended.

Read `records` first, then `run.spec`.
"""
