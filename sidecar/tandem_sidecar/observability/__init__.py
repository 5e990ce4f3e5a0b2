"""What operators see of the requests: metrics, recent requests, logs and spans.

All of it is made from one `record.Record` per request; the data path knows nothing else from here.
"""
