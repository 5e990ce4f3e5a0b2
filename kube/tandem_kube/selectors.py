"""Label selectors as they stand in objects (`metav1.LabelSelector`), evaluated here. Pure.

    matches({"matchLabels": {"app": "vllm"}}, {"app": "vllm", "tier": "a"})     True

For lists and watches the API server evaluates selectors itself.
"""

from collections.abc import Mapping
from typing import Any


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether all labels and expressions of `selector` hold for an object with `labels`.

    As in Kubernetes, an empty selector matches every object, and NotIn one without the label. An
    operator that is not known matches none.
    """
    by_label = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or ()
    return all(labels.get(key) == value for key, value in by_label.items()) and all(
        _holds(expression, labels) for expression in expressions
    )


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or ()
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case _:
            return False
