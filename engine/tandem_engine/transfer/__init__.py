"""Moves KV blocks between engines over TCP: hold, pull, verify, release.

    engine ──open, publish, complete──► producer ◄──wire──► puller ◄──pull, release── engine

Read `wire` first: it describes the protocol. `producer` keeps the KvHolds (`holds`, `hold_table`)
with their leases and serves reads (`listener`, `read_session`). `puller` fills local blocks
(`pull_progress`). `trust` has both sides prove that they belong to one set. `blockio` turns blocks
into bytes, `threads` runs the copying in worker threads. Which blocks a request has, and what
follows a failed load, is decided by the engine, not here.
"""
