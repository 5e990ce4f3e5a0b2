"""Statistics of a run; pure (no I/O, no clock) but for `files` and the main program of `schema`.

`collector` takes records as they come and keeps, in `groups` and `gaps`, what the figures need, and
the longest stall; `timeline` divides a run into intervals; `distributions` decides which
figures are invalid. `model` is the report as it is written to JSON, `schema` generates
docs/reference/bench-report.schema.json from it, `files` reads it back. `histogram` has the
mergeable distributions, `intervals` the confidence intervals of a report, `compare` those of the
difference between two.

Errors: `files.ReportError`. Read `model` first, then `collector`.
"""
