"""KV beyond the GPU: chunks in host memory and in external storage.

    GPU blocks ──save──► host tier (LRU) ──write-back──► storage (tandem_kvstore)
        ▲──────────────── load ◄──────────────┴────────────────┘

`kv_tiers` moves chunks for the engine's loop; `host_tier` is bookkeeping, `chunk_memory` copies.
"""
