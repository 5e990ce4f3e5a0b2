"""Whom to believe: signed plans and their keys, allowed prefill pods, certificates."""
