from .fixtures import decode, prefill, second_prefill, shared_engines, unified

__all__ = ["decode", "prefill", "second_prefill", "shared_engines", "unified"]
