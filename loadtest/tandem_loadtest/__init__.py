"""Open-loop load: traces, a streaming client that measures, and the report."""
