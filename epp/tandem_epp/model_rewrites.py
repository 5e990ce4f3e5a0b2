"""Requests for one model that another one serves, as llm-d's router rewrites them.

    InferenceModelRewrite   rules of a pool: model → weighted targets
    header MODEL_REWRITE    a target for this request, if no rule is for the model that it names

Pure, but for the random choice among the targets of a rule.

Errors: `BadBody`.
"""

from dataclasses import dataclass
from random import Random

import msgspec
from msgspec import Raw

from tandem_contract import headers as wire

from .answered_model import AnsweredModel
from .backends.rewrite_rules import RewriteRule, RewriteRules
from .bodies import CONTENT_TYPE, is_form, is_json
from .body_fields import UNREADABLE, decode_members, unreadable_body
from .ext_proc.messages import HttpRequest
from .form import FormModel, replace_form_model, with_form_model
from .large_bodies import LARGE


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
