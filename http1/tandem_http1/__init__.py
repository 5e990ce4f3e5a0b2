"""HTTP/1.1 on asyncio protocols, for clients and for engines.

`server` accepts clients and `client` is one client's connection, whose requests `reader` parses
with httptools. `upstream` pools the connections to engines and `connection` is one of them.
`framing` finds where a body ends, `messages` holds requests and response heads, `answers` relays
or collects an engine's answer, `deadline` is a time limit that a stalled loop does not use up, and
`tunnel` carries upgraded connections such as websockets.

Nothing here knows of prefill, decode or KV. Read `server` first, then `upstream`.
"""
