"""What a request body says, what a client may not say, and the edits of each leg.

Bytes in, bytes out: no I/O, and nothing of connectors or routes. `parse` comes first: every body
of a client goes through it.
"""
