"""KV tensors in external storage: object format, clients of stores, and what keeps both safe.

    engine ──blocks──► chunk_store ──► format      bytes of the objects, keys, checks: pure
                          │   └──────► guard       when to load, when to stop asking: pure
                          └──────────► stores      S3, HTTP, files: bytes in, bytes out

What a block means to an engine does not belong here, nor does torch or vLLM: engines pass buffers.
Start with `chunk_store`; docs/kv-storage.md has the layout of the objects and the table of faults.
"""
