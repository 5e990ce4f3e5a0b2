"""Observability of requests: metrics, recent requests by id, the log and spans.

All of it is made from one `record.Record` per request. The data path fills the record in and passes
it to `observer.RequestObserver`; it calls nothing else in this package. Read `record` first.
"""
