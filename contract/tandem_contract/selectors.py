"""Label selectors as they stand in objects (`metav1.LabelSelector`), evaluated here. Pure.

    matches({"matchLabels": {"app": "vllm"}}, {"app": "vllm", "tier": "a"})     True

For lists and watches the API server evaluates selectors itself.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

OPERATORS: Final = frozenset({"In", "NotIn", "Exists", "DoesNotExist"})


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether all labels and expressions of `selector` hold for an object with `labels`.

    As in Kubernetes, an empty selector matches every object, and NotIn one without the label. An
    operator that is not known matches none.
    """
    by_label = selector.get("matchLabels") or {}
    expressions = selector.get("matchExpressions") or ()
    return all(labels.get(key) == value for key, value in by_label.items()) and all(
        holds(labels.get(each["key"]), each["operator"], each.get("values") or ())
        for each in expressions
    )


def holds(value: str | None, operator: str, values: Collection[str]) -> bool:
    """Whether an expression of `operator` and `values` holds for a label's value; None: there is no
    such label."""
    match operator:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    return False
