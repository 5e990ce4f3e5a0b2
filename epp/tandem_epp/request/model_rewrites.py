"""Requests for one model that another one serves, as llm-d's router rewrites them.

    InferenceModelRewrite   rules of a pool: model → weighted targets
    header MODEL_REWRITE    a target for this request, if no rule is for the model that it names

Of several rules for a request, one for its model by name comes before one for all models, then that
of the older object, then the first in the object.

Pure, but for the random choice among the targets of a rule.

Errors: `BadBody`.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
from msgspec import Raw

from tandem_contract import headers as wire

from ..exchange import HttpRequest
from .answered_model import AnsweredModel
from .bodies import CONTENT_TYPE, is_form, is_json
from .body_fields import UNREADABLE, decode_members, unreadable_body
from .form import FormModel, replace_form_model, with_form_model
from .large_bodies import LARGE


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


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A request whose model was replaced."""

    asked: str | None
    """The model that the client named; None: none."""
    target: str
    body: bytes
    source: str
    """Name of the InferenceModelRewrite that says so; empty: the header does."""

    @property
    def answered_model(self) -> AnsweredModel | None:
        """What names the model in the answer as the client did; None: it named none."""
        return AnsweredModel(self.target, self.asked) if self.asked else None


class ModelRewrites:
    """Rewrites requests."""

    def __init__(self, random: Random) -> None:
        self.rules = RewriteRules()
        """Replaced as a whole."""
        self._random = random

    def may_apply(self, request: HttpRequest) -> bool:
        """Whether the model that the body names decides on a rewrite."""
        has_rewrites = bool(self.rules or _header(request))
        return has_rewrites and (is_json(request) or is_form(request))

    def rewrite(
        self,
        request: HttpRequest,
        model: str | None,
        body: bytes,
        place: tuple[int, int] | None = None,
    ) -> Rewrite | None:
        """The rewritten request, whose body names `model`; None: it stays. `place`: where in a
        form, if it is known. Raises BadBody."""
        rule = self.rules.rule(model)
        target = self._target(rule) if rule is not None else _header(request)
        if not target or target == model:
            return None
        if is_form(request):
            content_type = request.headers[CONTENT_TYPE]
            if place is None:
                body = with_form_model(content_type, body, target)
            else:
                body = replace_form_model(content_type, body, FormModel(model, *place), target)
        else:
            body = with_model(body, target)
        return Rewrite(model, target, body, rule.source if rule is not None else "")

    def _target(self, rule: RewriteRule) -> str:
        return self._random.choices(rule.targets, rule.weights)[0]


def with_model(body: bytes, model: str) -> bytes:
    """The JSON object `body` with another model. Raises BadBody."""
    value = msgspec.json.encode(model)
    try:
        if len(body) < LARGE:
            return msgspec.json.encode({**decode_members(body), "model": Raw(value)})
    except UNREADABLE as err:
        raise unreadable_body(body, err) from err
    # Decoding would block other streams. Of a repeated key the last one counts.
    return body[: body.rindex(b"}")] + b',"model":' + value + b"}"


def _header(request: HttpRequest) -> str | None:
    for name in wire.MODEL_REWRITES:
        if value := request.headers.get(name):
            # ext_proc's headers are read as latin-1, which keeps every byte.
            return value.encode("latin-1").decode("utf-8", "replace")
    return None
