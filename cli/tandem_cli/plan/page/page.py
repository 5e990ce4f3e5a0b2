"""Assembles the page from its parts."""

from importlib.resources import files
from typing import Final

import msgspec

from tandem_loadtest.page_parts import json_in_html, render

from .data import PageData

_SCRIPTS: Final = ("kernel.js", "model.js", "timeline.js", "charts.js", "page.js")


def page(data: PageData) -> str:
    """One HTML document that loads nothing from any network."""
    return render(
        files(__package__),
        "plan.html.jinja",
        style="plan.css",
        scripts=_SCRIPTS,
        data=data,
        page_data=json_in_html(msgspec.json.encode(data).decode()),
    )
