"""The rules of InferenceModelRewrite objects. Pure.

Of several rules for a request, one for its model by name comes before one for all models, then that
of the older object, then the first in the object.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RewriteRule:
    """What to do with requests for some models."""

    models: frozenset[str]
    """Empty: all models."""
    targets: tuple[str, ...]
    """At least one."""
    weights: tuple[int, ...]
    """Shares of the targets, each at least 1; 0 for those that are never chosen."""
    source: str = ""
    """Name of the InferenceModelRewrite that has it."""


@dataclass(frozen=True)
class RewriteObject:
    """An InferenceModelRewrite."""

    created: str
    """When, as Kubernetes writes it: such times sort like texts."""
    name: str
    rules: tuple[RewriteRule, ...]


class RewriteRules:
    """The rules of all objects together."""

    def __init__(self, objects: Iterable[RewriteObject] = ()) -> None:
        self._by_model: dict[str, RewriteRule] = {}
        self._for_all: RewriteRule | None = None
        for each in sorted(objects, key=lambda each: (each.created, each.name)):
            for rule in each.rules:
                if not rule.models:
                    self._for_all = self._for_all or rule
                for model in rule.models:
                    self._by_model.setdefault(model, rule)

    def __bool__(self) -> bool:
        return bool(self._by_model) or self._for_all is not None

    def rule(self, model: str | None) -> RewriteRule | None:
        """The rule for a request that names `model`; None: there is none."""
        return self._by_model.get(model or "", self._for_all)


def read_rewrite(body: Mapping[str, Any]) -> RewriteObject:
    """The rules of an InferenceModelRewrite, which its definition has validated."""
    metadata = body["metadata"]
    name = metadata["name"]
    return RewriteObject(metadata["creationTimestamp"], name, rewrite_rules(body["spec"], name))


def rewrite_rules(spec: Mapping[str, Any], source: str = "") -> tuple[RewriteRule, ...]:
    """The rules in the spec of the object named `source`. A rule without targets is left out."""
    rules = []
    for rule in spec.get("rules") or ():
        matches = [match.get("model") or {} for match in rule.get("matches") or ()]
        targets = rule.get("targets") or ()
        if targets:
            rules.append(
                RewriteRule(
                    frozenset(match.get("value", "") for match in matches),
                    tuple(target["modelRewrite"] for target in targets),
                    _weights([target.get("weight") for target in targets]),
                    source,
                )
            )
    return tuple(rules)


def _weights(weights: list[int | None]) -> tuple[int, ...]:
    """Equal ones where none is given; where only some are, the others are never chosen."""
    if not any(weights):
        return (1,) * len(weights)
    return tuple(weight or 0 for weight in weights)
