"""One request from the client's bytes to the answer's last: refused, handed off, or passed through.

`machine` decides and `moves` holds its words, both pure; `exchange` performs what it decides over
real connections, `prefilling` and `decoding` being its two sides. `proxy` is where every request
enters.
"""
