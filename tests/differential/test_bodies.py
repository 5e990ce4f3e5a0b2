"""What the edge accepts, each engine's parser reads the same, or refuses."""

from contextlib import nullcontext

import pytest
from hypothesis import given, settings

from tandem_contract.request_kinds import RequestKind
from tandem_contract.transfer_params import CLIENT_FORBIDDEN

from .edge import EdgeReading, read_form, read_json
from .readers import (
    JSON_PARSERS,
    EngineReading,
    FormReading,
    older_options,
    read_by_pydantic,
    read_by_python_multipart,
    read_by_starlette,
    read_by_torch_engine,
)
from .strategies import forms, json_bodies

pytestmark = pytest.mark.long

MANY = settings(max_examples=200, deadline=None)
_FORBIDDEN = frozenset({*CLIENT_FORBIDDEN, "vllm_xargs"})
_MOST = 10**8
"""Of a number with more digits the EPP reads the first ones: more than any engine generates."""


def check_same(edge: EdgeReading, engine: EngineReading) -> None:
    assert engine.forbidden == ()
    assert engine.model == edge.model
    assert engine.stream is edge.stream
    if engine.n != 1:
        assert edge.is_alone
    if engine.max_tokens is not None and engine.max_tokens >= 0:
        assert edge.max_tokens is not None
        assert min(edge.max_tokens, _MOST) == min(engine.max_tokens, _MOST)


@MANY
@given(json_bodies())
def test_json(request_body: tuple[RequestKind, bytes]) -> None:
    kind, body = request_body
    edge = read_json(kind, body)
    if edge is None:
        return
    for parse in JSON_PARSERS.values():
        engine = read_by_pydantic(kind, parse, edge.forwarded)
        if engine is None:
            continue
        # Sampling parameters of a generate request have types of their own.
        if kind is RequestKind.GENERATE:
            assert engine.forbidden == ()
        else:
            check_same(edge, engine)
    if kind in (RequestKind.COMPLETIONS, RequestKind.CHAT):
        check_torch_engine(kind, edge)


def check_torch_engine(kind: RequestKind, edge: EdgeReading) -> None:
    engine = read_by_torch_engine(kind, edge.forwarded)
    if engine is not None and engine.max_tokens is not None:
        assert engine.forbidden == ()
        assert (engine.model, engine.stream) == (edge.model, edge.stream)
        assert engine.n == 1 or edge.is_alone


FORM_READERS = (
    (nullcontext, read_by_starlette),
    (older_options, read_by_starlette),
    (nullcontext, read_by_python_multipart),
)


@MANY
@given(forms())
def test_forms(form: tuple[str, bytes]) -> None:
    content_type, body = form
    edge = read_form(content_type, body)
    if edge is None:
        return
    for context, read in FORM_READERS:
        with context():
            engine: FormReading | None = read(content_type, edge.forwarded)
        if engine is not None:
            assert _FORBIDDEN.isdisjoint(engine.names)
            assert engine.model == edge.model
