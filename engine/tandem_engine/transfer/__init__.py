"""Moving KV blocks between engines over TCP: hold, pull, verify, release.

    engine ──open, progress, complete──► producer ◄──wire──► puller ◄──pull, release── engine

Read `wire` first: the protocol as a picture. `producer` keeps `holds` (leases) and serves reads
(`listener`, `sending`); `puller` fills local blocks (`reading`). `blockio` turns blocks into bytes,
`threads` runs the copying beside the event loop. Never here: which blocks a request has, what
follows a failed load.
"""
