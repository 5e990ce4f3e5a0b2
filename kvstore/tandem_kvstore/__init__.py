"""KV tensors in external storage: format of the objects, clients of stores, and when to use them.

    engine ──buffers──► client ──┬── guard                     when to load, circuit breaker: pure
                                 └── chunk_store ──┬── format  bytes of objects, keys, checks: pure
                                                   └── stores  S3, HTTP, files: bytes in, bytes out

This package knows neither torch nor vLLM, nor what a block means to an engine: engines pass
buffers. Start with `chunk_store`, then `client`; docs/understand/storage.md has the layout of the
objects, docs/run/storage.md the table of faults.
"""
