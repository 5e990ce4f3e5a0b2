"""Decides when to load and when to stop asking a store. Pure: the caller passes times, in seconds
of one clock, and reports how requests ended.
"""
