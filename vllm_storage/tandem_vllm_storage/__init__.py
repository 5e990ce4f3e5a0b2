"""vLLM's connector for KV in external storage: `tandem_kvstore` behind KVConnectorBase_V1.

    vLLM ── connector ──┬── scheduler ──┬── plan           what to load and to save: pure
                        │               ├── handoff        answers of prefill legs, decode legs
                        │               ├── stored_chunks  what the store has; KV events
                        │               └── identity       what the engine's KV depends on
                        ├── requests, events     vLLM's requests and KV events
                        ├── worker ──── block_copies  between vLLM's blocks and host memory (torch)
                        ├── stats                     metrics (vLLM)
                        └── messages, settings        what the two sides send; settings

The package runs in vLLM's own processes and Python. Only `connector`, `stats`, `requests`, `events`
and `secondary_tier` import vLLM, and only `block_copies` imports torch. Start with
docs/understand/storage.md, then `connector`.
"""
