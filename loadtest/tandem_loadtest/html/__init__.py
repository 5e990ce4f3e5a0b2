"""The report as one HTML file that needs no network: `page(report)`.

Everything in here is pure: values of `figures.model` become words and tables (`summary`, `tables`),
charts as Plotly's JSON (`charts`, `timeline`), and at last a page (`page`, with the template, style
and script beside it). Text from outside (server names, reasons, commands) is escaped by the
template; `charts` escapes what Plotly would read as markup.

What a person reads first comes first: losses, then latency. A figure that is invalid is never shown
as if it were good: its value stands behind the word and its reason.
"""

from .page import page

__all__ = ["page"]
