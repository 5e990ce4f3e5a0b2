"""YAML documents that remember the line of each value, so that an error can name file and line.

    document = load_documents(path)[0]
    document.where("spec.model.name")  ->  "pools.yaml:7"

Errors: `DocumentError`, one line of the form `file:line: path: what is wrong`.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedBase, CommentedMap, CommentedSeq
from ruamel.yaml.constructor import DuplicateKeyError
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.reader import ReaderError
from ruamel.yaml.scalarbool import ScalarBoolean

from .durations import parse_duration

Path_ = Sequence[str | int]
_STEP: Final = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


class DocumentError(ValueError):
    """A document that cannot be used; the message has file, line, path and cause."""


@dataclass(frozen=True)
class Document:
    """One YAML document: plain dicts, lists and scalars in `data`, with the line of each."""

    file: str
    data: Any
    _marks: Any = field(repr=False, compare=False, default=None)

    def where(self, path: str | Path_) -> str:
        """`file:line` of the value at `path` (`backends[1].role`), or of its nearest parent."""
        return f"{self.file}:{self._line(steps(path))}"

    def error(self, path: str | Path_, message: str) -> DocumentError:
        """An error about the value at `path`."""
        dotted = path if isinstance(path, str) else dotted_path(path)
        return DocumentError(f"{self.where(path)}: {dotted + ': ' if dotted else ''}{message}")

    def seconds(self, path: str | Path_, value: object, zero: str | None) -> float:
        """The seconds in the duration `value` at `path`. `zero`: what is wrong with one of 0; None:
        nothing. Raises DocumentError."""
        # A bare number in YAML is refused: its unit would be a guess.
        if not isinstance(value, str):
            raise self.error(path, f'{value!r} has no unit: write "30s" or "250ms"')
        try:
            seconds = parse_duration(value)
        except ValueError as err:
            raise self.error(path, str(err)) from err
        if seconds == 0 and zero:
            raise self.error(path, zero)
        return seconds

    def part(self, path: str | Path_) -> "Document":
        """The value at `path` as a document of its own, whose errors keep their lines; None as
        `data` where there is none."""
        data, marks = self.data, self._marks
        for step in steps(path):
            data, marks = _child(data, step), _child(marks, step)
        return Document(self.file, data, marks)

    def _line(self, path: Path_) -> int:
        node, line = self._marks, getattr(getattr(self._marks, "lc", None), "line", 0) or 0
        for step in path:
            if isinstance(node, CommentedMap) and step in node:
                # A key that comes from a merge (`<<: *other`) has no line of its own here.
                line = node.lc.key(step)[0] if step in node.lc.data else line
            elif isinstance(node, CommentedSeq) and isinstance(step, int) and step < len(node):
                line = node.lc.item(step)[0]
            else:
                break
            node = node[step]
        return int(line) + 1


def load_documents(file: Path) -> list[Document]:
    """Every non-empty document of `file`. Raises DocumentError when it cannot be read as YAML."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as err:
        raise DocumentError(f"{file}: cannot read it: {err.strerror}") from err
    except UnicodeDecodeError as err:
        line = file.read_bytes()[: err.start].count(b"\n") + 1
        raise DocumentError(f"{file}:{line}: not UTF-8 (byte {err.start})") from err
    return parse_documents(text, str(file))


def parse_documents(text: str, file: str) -> list[Document]:
    """Every non-empty document of `text`; `file` is its name in errors. Raises DocumentError."""
    try:
        # Round trip, because only this loader keeps the line of each value.
        loaded = list(YAML(typ="rt").load_all(text))
        return [Document(file, _plain(node), node) for node in loaded if node is not None]
    except DuplicateKeyError as err:
        # The parser's message shows both values, which may be credentials.
        problem = str(err.problem).partition(" with value")[0]
        raise DocumentError(f"{file}{_line_of(err)}: not YAML: {problem}") from err
    except MarkedYAMLError as err:
        problem = err.problem or err.context
        raise DocumentError(f"{file}{_line_of(err)}: not YAML: {problem}") from err
    except ReaderError as err:
        line = text.count("\n", 0, err.position) + 1
        cause = f"character U+{err.character:04X}: {err.reason}"
        raise DocumentError(f"{file}:{line}: not YAML: {cause}") from err
    except YAMLError as err:
        raise DocumentError(f"{file}: not YAML: {' '.join(str(err).split())}") from err
    # YAML allows an alias to a parent, which makes an endless structure.
    except RecursionError as err:
        raise DocumentError(f"{file}: nested too deeply, or an alias within itself") from err


def _line_of(err: MarkedYAMLError) -> str:
    mark = err.problem_mark or err.context_mark
    return f":{mark.line + 1}" if mark else ""


def _child(node: Any, step: str | int) -> Any:
    """The value of a key or an index; None where there is none."""
    if isinstance(node, dict):
        return node.get(step)
    is_item = isinstance(node, list) and isinstance(step, int) and step < len(node)
    return node[step] if is_item else None


def steps(path: str | Path_) -> list[str | int]:
    """A path such as `$.backends[1].role` as a list of keys and indexes."""
    if not isinstance(path, str):
        return list(path)
    matches = _STEP.findall(path.removeprefix("$"))
    return [int(index) if index else name for name, index in matches]


def dotted_path(path: Path_) -> str:
    """Keys and indexes as a path such as `backends[1].role`."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def _plain(node: Any) -> Any:
    """`node` in builtin types only: ruamel's own types carry formatting."""
    if isinstance(node, dict):
        return {_plain(key): _plain(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_plain(value) for value in node]
    if isinstance(node, ScalarBoolean):
        return bool(node)
    # bool first: it is a subclass of int.
    for kind in (bool, int, float, str):
        if isinstance(node, kind):
            return kind(node)
    if isinstance(node, CommentedBase):
        return str(node)
    return node
