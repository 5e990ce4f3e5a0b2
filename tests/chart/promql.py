"""Series and labels in a PromQL expression; parses the subset of PromQL that the chart uses."""

import re

_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_GROUPING = re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\b\s*(?:\(([^)]*)\))?")
_MATCHERS = re.compile(r"\{([^}]*)\}")
_RANGE = re.compile(r"\[[^\]]*\]")
_NAME = re.compile(r"(?<![\w:])[a-zA-Z_:][\w:]*")
_SELECTOR = re.compile(r"([a-zA-Z_:][\w:]*)\s*\{([^}]*)\}")
_OPERATORS = frozenset({"and", "or", "unless", "bool", "offset"})


def series(expression: str) -> set[str]:
    """Names of the series that the expression reads."""
    bare = _STRING.sub('""', expression)
    for left_out in (_GROUPING, _MATCHERS, _RANGE):
        bare = left_out.sub(" ", bare)
    functions = {match[1] for match in re.finditer(r"([a-z_]+)\s*\(", bare)}
    return set(_NAME.findall(bare)) - functions - _OPERATORS


def matched_labels(expression: str) -> dict[str, set[str]]:
    """Labels in the braces of each series."""
    bare = _STRING.sub('""', expression)
    values: dict[str, set[str]] = {}
    for match in _SELECTOR.finditer(bare):
        values.setdefault(match[1], set()).update(_NAME.findall(match[2].replace('""', "")))
    return values


def grouped_labels(expression: str) -> set[str]:
    """Labels by which results are grouped or joined."""
    bare = _STRING.sub('""', expression)
    return {name for match in _GROUPING.finditer(bare) for name in _NAME.findall(match[1] or "")}


def legend_labels(legend: str) -> list[str]:
    """Labels that a Grafana legend shows."""
    return re.findall(r"\{\{(\w+)\}\}", legend)
