"""KV beyond the GPU: chunks in host memory and in external storage.

    GPU blocks ──save──► host tier (LRU) ──write-back──► storage (tandem_kvstore)
        ▲──────────────── load ◄──────────────┴────────────────┘

`kv_tiers` is what the engine's loop calls. `saves` saves chunks, those of a running step by
`step_layers`; `loads` loads them. `arriving` lets a step compute while later layers load, `rear`
while later chunks load. `host_tier` is bookkeeping, `chunk_memory` copies.
"""
