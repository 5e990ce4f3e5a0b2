"""Request and answer bodies: bytes in, bytes out.

`parse` removes what a client may not set; every client body passes through it first. `kinds` tells
which requests generate text and which of them one engine must serve alone. `edit` makes the bodies
of the prefill and decode legs, and `usage` corrects the count of cached tokens in an answer.

No I/O here, and no knowledge of connectors, routes or pods.
"""
