"""KV events: what engines say, over ZMQ, about the blocks in their caches.

`messages` decodes batches of events, `sequence` decides what a batch's number means (the next one,
a duplicate, a gap, another engine), `feed` applies batches to `prefix.pod_blocks`, `subscriber`
talks to one engine, and `collector` runs one subscriber per pod. How blocks are stored and matched
belongs to `pod_blocks`; which pod is chosen belongs to `choice`. Read `subscriber` first.
"""
