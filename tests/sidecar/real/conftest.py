from .fixtures import decode, prefill, second_prefill, second_unified, shared_engines, unified

__all__ = ["decode", "prefill", "second_prefill", "second_unified", "shared_engines", "unified"]
