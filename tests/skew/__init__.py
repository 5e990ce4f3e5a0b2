"""Processes of an older version beside those of this one, as during an upgrade."""
