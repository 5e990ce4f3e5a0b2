"""Reads an HTML page as a browser would, as far as the tests need it."""

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

VOID = {"meta", "link", "br", "hr", "img", "input"}


@dataclass
class Element:
    """An element and what is in it."""

    tag: str
    attributes: dict[str, str]
    content: list["str | Element"] = field(default_factory=list)

    @property
    def inner(self) -> list["Element"]:
        """Elements directly in it."""
        return [part for part in self.content if isinstance(part, Element)]

    @property
    def text(self) -> str:
        """Text directly in it."""
        return "".join(part for part in self.content if isinstance(part, str))

    @property
    def words(self) -> str:
        """All text, that of inner elements included."""
        parts = (part if isinstance(part, str) else part.words for part in self.content)
        return "".join(parts)


class Document(HTMLParser):
    """All elements in order. Raises AssertionError when an end tag does not fit."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.elements: list[Element] = []
        self._open: list[Element] = []
        self.feed(source)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        element = Element(tag, {name: value or "" for name, value in attrs})
        self.elements.append(element)
        if self._open:
            self._open[-1].content.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> without a start"
        assert self._open[-1].tag == tag, f"</{tag}> in <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open:
            self._open[-1].content.append(data)

    def all(self, tag: str, **attributes: Any) -> list[Element]:
        """Elements with this tag and these attributes, in order; `class_` for `class`."""
        expected = {name.rstrip("_"): value for name, value in attributes.items()}
        return [
            element
            for element in self.elements
            if element.tag == tag and expected.items() <= element.attributes.items()
        ]
