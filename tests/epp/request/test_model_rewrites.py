"""Models that others serve: which rule counts, what the engine gets, and what the client sees."""

import asyncio
import json
from collections import Counter
from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tandem_contract import headers as wire
from tandem_epp.backends.precise import PrecisePrefixes
from tandem_epp.exchange import HttpRequest, NotPlaced, ResponseHeaders
from tandem_epp.placement.preparer import Preparer
from tandem_epp.request.answered_model import AnsweredModel
from tandem_epp.request.large_bodies import LARGE
from tandem_epp.request.model_rewrites import (
    ModelRewrites,
    RewriteObject,
    RewriteRules,
    rewrite_rules,
    with_model,
)

from ..placement.test_picker import NOW, PickerSetup


def rule(*models: str, **targets: int | None) -> dict[str, Any]:
    """A rule as the API server has it; `targets`: name → weight."""
    matches = [{"model": {"type": "Exact", "value": model}} for model in models]
    listed = [
        {"modelRewrite": name} | ({} if weight is None else {"weight": weight})
        for name, weight in targets.items()
    ]
    return {"matches": matches, "targets": listed}


def an_object(created: str, name: str, *rules: dict[str, Any]) -> RewriteObject:
    return RewriteObject(created, name, rewrite_rules({"rules": list(rules)}))


def rewrites(*objects: RewriteObject) -> ModelRewrites:
    made = ModelRewrites(Random(3))
    made.rules = RewriteRules(objects)
    return made


def target(made: ModelRewrites, model: str | None, **headers: str) -> str | None:
    request = HttpRequest("POST", "/v1/completions", headers)
    rewrite = made.rewrite(request, model, json.dumps({"model": model}).encode())
    return rewrite.target if rewrite is not None else None


def test_precedence_of_rules() -> None:
    objects = (
        an_object("2026-01-02T00:00:00Z", "b", rule("a", b=None), rule(all_b=None)),
        an_object("2026-01-01T00:00:00Z", "c", rule("c", "a", d=None), rule("c", e=None)),
        an_object("2026-01-03T00:00:00Z", "a", rule("a", f=None), rule(all_a=None)),
    )
    made = rewrites(*objects)
    assert target(made, "a") == "d", "the oldest object"
    assert target(made, "c") == "d", "the first rule of an object"
    assert target(made, "x") == "all_b", "the oldest rule for all models"
    assert target(made, None) == "all_b"
    assert target(made, "all_b") is None, "nothing to replace"
    assert target(rewrites(), "a") is None


def test_a_rule_comes_before_the_header_and_the_header_before_its_older_name() -> None:
    made = rewrites(an_object("2026", "a", rule("a", b=None)))
    new, old = wire.MODEL_REWRITE, wire.MODEL_REWRITE_OLDER
    assert target(made, "a", **{new: "x"}) == "b"
    assert target(made, "c", **{new: "x", old: "y"}) == "x"
    assert target(made, "c", **{old: "y"}) == "y"
    assert target(made, None, **{new: "x"}) == "x"
    assert target(made, "c", **{new: ""}) is None
    assert target(made, "c", **{new: "größe".encode().decode("latin-1")}) == "größe"


@pytest.mark.parametrize(
    ("targets", "shares"),
    [
        ({"a": 3, "b": 1}, {"a": 0.75, "b": 0.25}),
        ({"a": None, "b": None}, {"a": 0.5, "b": 0.5}),
        ({"a": 5, "b": None}, {"a": 1.0}),
        ({"a": None}, {"a": 1.0}),
    ],
)
def test_targets_by_weight(targets: dict[str, int | None], shares: dict[str, float]) -> None:
    made = rewrites(an_object("2026", "o", rule("m", **targets)))
    counts = Counter(target(made, "m") for _ in range(4000))
    assert {name: count / 4000 for name, count in counts.items()} == pytest.approx(shares, abs=0.03)


def test_only_a_rule_with_targets_counts() -> None:
    assert rewrite_rules({"rules": [{"matches": []}, {"targets": []}]}) == ()
    assert rewrite_rules({}) == ()


@given(st.dictionaries(st.text(max_size=4), st.integers() | st.text(), max_size=4), st.text())
def test_only_the_model_of_a_body_changes(fields: dict[str, Any], model: str) -> None:
    body = json.dumps({**fields, "n": 2**80}).encode()
    assert json.loads(with_model(body, model)) == {**fields, "n": 2**80, "model": model}
    large = body[:-1] + b', "x": "' + b"y" * LARGE + b'"} \n'
    assert json.loads(with_model(large, model))["model"] == model


CHUNKS = st.lists(
    st.sampled_from([b'"model":"t/1"', b'"model": "t/1"', b'"mod', b'el":', b' "t/', b'1"', b'"'])
    | st.binary(max_size=3),
    max_size=12,
)


@given(CHUNKS, st.lists(st.integers(0, 120), max_size=8))
def test_an_answer_is_changed_alike_however_it_is_cut(parts: list[bytes], cuts: list[int]) -> None:
    answer = b"".join(parts)
    places = sorted({0, *(cut for cut in cuts if cut < len(answer)), len(answer)})
    chunks = [answer[a:b] for a, b in pairwise(places)] or [b""]
    model = AnsweredModel("t/1", "asked")
    sent = b"".join(
        model.feed(chunk, is_last=i == len(chunks) - 1) for i, chunk in enumerate(chunks)
    )
    assert sent == AnsweredModel("t/1", "asked").replace(answer)
    assert b'"model":"t/1"' not in sent


def test_only_members_are_changed_and_events_are_not_held_back() -> None:
    model = AnsweredModel("t", 'a "b"')
    event = b'data: {"id":"1","model":"t","text":"\\"model\\":\\"t\\""}\n\n'
    expected = event.replace(b'"model":"t"', b'"model":"a \\"b\\""')
    assert model.feed(event, is_last=False) == expected
    assert model.feed(b'{"model":"t2"}', is_last=True) == b'{"model":"t2"}'


@pytest.fixture
def setup() -> PickerSetup:
    """Pods that serve `m`, for which clients ask by the name `alias`."""
    setup = PickerSetup(d="decode", p="prefill")
    setup.picker.rewrites.rules = RewriteRules([an_object("2026", "o", rule("alias", m=None))])
    return setup


def test_a_rewritten_request_is_placed_and_remembered_as_one_for_its_target(
    setup: PickerSetup,
) -> None:
    fields = {"prompt": "word " * 400, "max_tokens": 2**70}
    request = HttpRequest("POST", "/v1/completions", {"content-length": "7"})
    placement = setup.picker.place(request, json.dumps({"model": "alias", **fields}).encode(), NOW)
    assert placement.decision.model == "m"
    body = placement.take_body()
    assert body is not None
    assert json.loads(body) == {"model": "m", **fields}
    assert dict(placement.mutation.set)["content-length"] == str(len(body))
    assert placement.take_body() is None
    assert placement.answered_model is not None
    assert placement.answered_model.replace(b'{"model":"m"}') == b'{"model":"alias"}'
    placement.on_response_headers(ResponseHeaders(None), NOW)
    placement.end(NOW)
    direct = setup.picker.place(request, json.dumps({"model": "m", **fields}).encode(), NOW)
    assert direct.take_body() is None
    assert direct.answered_model is None
    assert "content-length" not in dict(direct.mutation.set)
    assert direct.decision.cached_tokens > 400, "the same prompt of the same model"


def test_the_header_is_removed_also_where_it_changes_nothing(setup: PickerSetup) -> None:
    for name, model in ((wire.MODEL_REWRITE, "m"), (wire.MODEL_REWRITE_OLDER, "other")):
        request = HttpRequest("POST", "/v1/completions", {name: "m"})
        assert setup.picker.needs_body(request)
        body = json.dumps({"model": model, "prompt": "x"}).encode()
        placement = setup.picker.place(request, body, NOW)
        assert name in placement.mutation.remove
        assert placement.decision.model == "m"
        assert (placement.take_body() is None) is (model == "m")


def test_an_unknown_target_and_a_wrong_body_are_answered(setup: PickerSetup) -> None:
    for header, body, status in (("unknown", b'{"model": "m"}', 404), ("m", b'{"model": 5}', 400)):
        request = HttpRequest("POST", "/v1/completions", {wire.MODEL_REWRITE: header})
        with pytest.raises(NotPlaced) as refusal:
            setup.picker.place(request, body, NOW)
        assert refusal.value.reply.status == status


def test_any_json_of_the_api_is_rewritten(setup: PickerSetup) -> None:
    for path in ("/v1/embeddings", "/v1/messages/count_tokens"):
        request = HttpRequest("POST", path, {})
        assert setup.picker.needs_body(request)
        placement = setup.picker.place(request, b'{"model": "alias"}', NOW)
        assert placement.take_body() == b'{"model":"m"}'


async def test_a_large_body_is_rewritten_once_and_read_elsewhere(setup: PickerSetup) -> None:
    setup.picker.rewrites.rules = RewriteRules(
        [an_object("2026", "o", rule("alias", m=1, other=999_999))]
    )
    setup.picker.rewrites._random.seed(5)
    precise = PrecisePrefixes(setup.fleet, lambda *_: None)
    preparer = Preparer(precise, setup.picker.rewrites, setup.metrics.faults, setup.flow_control())
    request = HttpRequest("POST", "/v1/completions", {})
    body = json.dumps({"model": "alias", "prompt": "word " * 200_000}).encode()
    targets = []
    try:
        for _ in range(3):
            context = preparer.prepare(request, body)
            assert context is not None
            async with context as preparation:
                rewrite = preparation.rewrite  # type: ignore[attr-defined]
                prepared = HttpRequest("POST", "/v1/completions", {}, preparation=preparation)
                with pytest.raises(NotPlaced) as refusal:
                    setup.picker.place(prepared, body, NOW)
                assert json.loads(rewrite.body)["model"] == "other"
                targets.append(refusal.value.reply.status)
    finally:
        await asyncio.wait_for(preparer.close(), 10)
    assert targets == [404] * 3
