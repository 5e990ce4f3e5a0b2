"""The decode pod's proxy: runs the hand-off, prefill there, KV across, decode here."""
