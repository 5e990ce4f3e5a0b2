"""HTTP/1.1 on asyncio protocols: requests through httptools, answers handed on unparsed.

`server` is the client's side, `upstream` the pooled connections to engines, `framing` finds where
an answer ends, `messages` holds heads and requests. It knows nothing of hand-offs.
"""
