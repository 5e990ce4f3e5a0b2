"""Runs Pod JSON as processes on one machine."""
