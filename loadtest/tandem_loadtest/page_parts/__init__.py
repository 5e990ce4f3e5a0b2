"""What pages of one HTML file have in common: frame, style, theme button. Pure.

    text = render(files(__package__), "report.html.jinja", style="report.css", scripts=[...], ...)

A page loads nothing: style and scripts are in it, and its Content-Security-Policy allows those
scripts alone. `frame.html.jinja` is what pages extend, `base.css` the colours of both themes and
the elements that pages share; `theme.js` comes before the scripts of a page. Not here: charts, and
what a page says.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Final

import jinja2

_FOLDER: Final = files(__package__)


def render(
    folder: Traversable,
    template: str,
    *,
    style: str,
    scripts: Sequence[str],
    libraries: Sequence[str] = (),
    **values: object,
) -> str:
    """The page of a template in `folder`. `style` and `scripts`: names of files there; the scripts
    are one in the page. `libraries`: texts of scripts that come before."""
    script = "\n".join([_read(_FOLDER, "theme.js"), *(_read(folder, name) for name in scripts)])
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(lambda name: _find(folder, name)),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        style=_read(_FOLDER, "base.css") + _read(folder, style),
        scripts=[*libraries, script],
        script_sources=" ".join(map(_hash, [*libraries, script])),
        **values,
    )


def json_in_html(text: str) -> str:
    """JSON that can stand in a script element, which a `<` could end."""
    return text.replace("<", "\\u003c")


def _find(folder: Traversable, name: str) -> str:
    return _read(_FOLDER if name == "frame.html.jinja" else folder, name)


def _read(folder: Traversable, name: str) -> str:
    return folder.joinpath(name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """The source expression that lets a Content-Security-Policy run exactly this script."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
