"""YAML that knows its lines; every way of being no YAML is one line with a place."""

from pathlib import Path
from typing import Any

import pytest

from tandem_contract.documents import (
    Document,
    DocumentError,
    dotted_path,
    load_documents,
    parse_documents,
    steps,
)

POOL = """\
# a comment
spec:
  model: {name: tiny,
          dtype: float32}

  backends:
  - name: a
    role: prefill
  - name: b

    role: decode
  matrix:
  - - 1
    - 2
"""


def parsed(text: str) -> Document:
    (document,) = parse_documents(text, "f.yaml")
    return document


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("", 2),
        ("spec", 2),
        ("spec.model", 3),
        ("spec.model.dtype", 4),
        ("spec.backends[0].role", 8),
        ("$.spec.backends[1]", 9),
        ("spec.backends[1].role", 11),
        (["spec", "backends", 1, "role"], 11),
        ("spec.matrix[0][1]", 14),
        ("spec.model.missing", 3),
        ("spec.backends[7].role", 6),
        ("nowhere", 2),
    ],
)
def test_a_value_has_the_line_it_stands_on_or_its_parents(path: Any, line: int) -> None:
    assert parsed(POOL).where(path) == f"f.yaml:{line}"


def test_a_part_keeps_its_lines() -> None:
    part = parsed(POOL).part("spec.backends[1]")
    assert part.data == {"name": "b", "role": "decode"}
    assert str(part.error("role", "wrong")) == "f.yaml:11: role: wrong"


@pytest.mark.parametrize("path", ["spec.missing.deeper", "spec.backends[2]", "spec.model.name[0]"])
def test_a_part_that_is_not_there_holds_nothing(path: str) -> None:
    assert parsed(POOL).part(path).data is None


def test_an_error_says_file_line_path_and_what() -> None:
    error = parsed(POOL).error(["spec", "backends", 1, "role"], "is odd")
    assert str(error) == "f.yaml:11: spec.backends[1].role: is odd"
    assert str(parsed(POOL).error("", "is odd")) == "f.yaml:2: is odd"


def test_paths_and_steps_are_inverse() -> None:
    path = ["a", 0, 1, "b-c"]
    assert steps(dotted_path(path)) == path


def test_documents_are_plain_and_empty_ones_left_out() -> None:
    first, second = parse_documents("---\na: 1\n---\n---\nb: [true, 1.5, x, null]\n", "f.yaml")
    assert (first.data, second.data) == ({"a": 1}, {"b": [True, 1.5, "x", None]})
    assert second.where("b") == "f.yaml:5"
    assert parse_documents("", "f.yaml") == parse_documents("# nothing\n", "f.yaml") == []


@pytest.mark.parametrize(
    ("text", "value", "kind"),
    [
        ("a: true", True, bool),
        ("a: &x true", True, bool),
        ("a: 0x1F", 31, int),
        ("a: 1.5", 1.5, float),
        ("a: 'x'", "x", str),
        ("a: |\n  x", "x", str),
        ("a: !own x", "x", str),
        ("a: &x [1]", [1], list),
    ],
)
def test_values_are_builtin_types(text: str, value: object, kind: type) -> None:
    actual = parsed(text).data["a"]
    assert actual == value
    assert type(actual) is kind


def test_aliases_and_merges_are_resolved_and_still_have_a_line() -> None:
    document = parsed("a: &x {k: 1, l: 2}\nb:\n  <<: *x\n  l: 3\nc: *x\n")
    assert document.data == {"a": {"k": 1, "l": 2}, "b": {"k": 1, "l": 3}, "c": {"k": 1, "l": 2}}
    assert document.where("b.k") == "f.yaml:2"
    assert document.where("b.l") == "f.yaml:4"


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("a: 1\nb: [1", 2, "not YAML: expected"),
        ("a: 1\n\tb: 2", 2, "not YAML"),
        ("a: b: c", 1, "not YAML: mapping values are not allowed"),
        ("a: 1\nb: *nope", 2, "undefined alias 'nope'"),
        ("a: 1\nb: 2\na: 3", 3, 'duplicate key "a"'),
        ("a: 1\nb: \x00", 2, "not YAML: character U+0000: special"),
        ("%YAML 3.0\n---\na: 1", 1, "not YAML"),
    ],
)
def test_invalid_yaml_is_one_line_with_file_and_line(text: str, line: int, says: str) -> None:
    with pytest.raises(DocumentError) as caught:
        parse_documents(text, "f.yaml")
    assert str(caught.value).startswith(f"f.yaml:{line}: ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_duplicate_key_does_not_show_its_values() -> None:
    with pytest.raises(DocumentError) as caught:
        parse_documents("secret_key: hush1\nsecret_key: hush2\n", "f.yaml")
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("text", ["&a [*a]", "[" * 500])
def test_what_never_ends_is_an_error(text: str) -> None:
    with pytest.raises(DocumentError, match=r"^f\.yaml: nested too deeply"):
        parse_documents(text, "f.yaml")


def test_a_file_is_read_with_its_name(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_text("a: ä\n", encoding="utf-8")
    (document,) = load_documents(file)
    assert document.data == {"a": "ä"}
    assert document.where("a") == f"{file}:1"


def test_a_file_that_is_not_utf8_names_line_and_byte(tmp_path: Path) -> None:
    file = tmp_path / "f.yaml"
    file.write_bytes(b"a: 1\nb: \xff\n")
    with pytest.raises(DocumentError, match=f"^{file}:2: not UTF-8 \\(byte 8\\)$"):
        load_documents(file)


def test_a_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(DocumentError, match=r"none: cannot read it: No such file or directory$"):
        load_documents(tmp_path / "none")
    with pytest.raises(DocumentError, match=r"cannot read it: Is a directory$"):
        load_documents(tmp_path)
