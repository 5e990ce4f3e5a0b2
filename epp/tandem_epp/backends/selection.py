"""Names and label selectors as flags give them. Pure.

Errors: ValueError, which names the flag.
"""

import re
from typing import Final

from tandem_contract import labels

from .pod_backend import PodSelection

_NAME: Final = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"
_KEY: Final = rf"(?:[a-z0-9][-a-z0-9.]*/)?{_NAME}"
_REQUIREMENT: Final = (
    rf"(?:!?{_KEY}|{_KEY}\s*(?:=|==|!=)\s*(?:{_NAME})?|{_KEY}\s+(?:not)?in\s*\([^()]*\))"
)
_SELECTOR: Final = re.compile(rf"\s*{_REQUIREMENT}\s*(?:,\s*{_REQUIREMENT}\s*)*")
"""A Kubernetes label selector."""
_LABEL: Final = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
"""The name of a Kubernetes object or namespace (RFC 1123 label)."""
_SUBDOMAIN: Final = re.compile(rf"{_LABEL.pattern}(?:\.{_LABEL.pattern})*")


def checked_label(flag: str, text: str) -> str:
    """`text` if it can be the name of a namespace. Raises ValueError."""
    if not _LABEL.fullmatch(text):
        raise ValueError(
            f"{flag}: {text!r} is not a valid name: use lower-case letters, digits and '-', at "
            "most 63"
        )
    return text


def checked_subdomain(flag: str, text: str) -> str:
    """`text` if it can be the name of an object or an API group. Raises ValueError."""
    if len(text) > 253 or not _SUBDOMAIN.fullmatch(text):
        raise ValueError(
            f"{flag}: {text!r} is not a valid name: use lower-case letters, digits, '-' and '.'"
        )
    return text


def checked_selector(flag: str, text: str) -> str:
    """`text` if it is a label selector. Raises ValueError."""
    if not _SELECTOR.fullmatch(text):
        raise ValueError(f"{flag}: {text!r} is not a label selector: write app=vllm,tier in (a, b)")
    return text


def selected_pods(
    namespace: str | None, endpoint: str | None, selector: str | None, target_port: int
) -> PodSelection:
    """The pods of a routing endpoint, or that a label selector matches. Raises ValueError."""
    if not namespace:
        raise ValueError("--discovery kubernetes needs --namespace")
    if bool(endpoint) == bool(selector):
        raise ValueError("--discovery kubernetes needs either --endpoint or --selector")
    checked_label("--namespace", namespace)
    if endpoint:
        checked_label("--endpoint", endpoint)
        selector = labels.endpoint_label(endpoint)
    else:
        checked_selector("--selector", selector or "")
    return PodSelection(namespace, selector or "", (target_port,))
