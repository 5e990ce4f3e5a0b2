"""Faults of kopf, each with the least that shows it; docs/understand/operator.md has the reports.

A test fails once kopf has mended its fault: then the workaround that it names goes.
"""
