from .fixtures import decode, prefill, second_prefill, shared_engines

__all__ = ["decode", "prefill", "second_prefill", "shared_engines"]
