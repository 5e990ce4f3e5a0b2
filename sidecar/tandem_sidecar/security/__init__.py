"""Trust and authentication: signed plans and their keys, allowed prefill pods, TLS certificates.

Read `route` first: it decides a request's routing path from its headers.
"""
