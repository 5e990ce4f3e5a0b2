"""What a request body says, what a client may not say, and the edits of each leg.

Bytes in, bytes out: no I/O, and nothing of connectors or routes.
"""
