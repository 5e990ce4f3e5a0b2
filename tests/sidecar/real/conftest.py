from .fixtures import decode, prefill, second, started

__all__ = ["decode", "prefill", "second", "started"]
