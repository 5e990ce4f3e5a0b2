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


@pytest.mark.parametrize("parser", JSON_PARSERS)
@MANY
@given(json_bodies())
def test_vllms_way_to_read_json(parser: str, request_body: tuple[RequestKind, bytes]) -> None:
    kind, body = request_body
    edge = read_json(kind, body)
    engine = None if edge is None else read_by_pydantic(kind, JSON_PARSERS[parser], edge.forwarded)
    # Sampling parameters of a generate request have types of their own.
    if edge is not None and engine is not None and kind is not RequestKind.GENERATE:
        check_same(edge, engine)
    elif engine is not None:
        assert engine.forbidden == ()


@MANY
@given(json_bodies())
def test_the_torch_engines_way_to_read_json(request_body: tuple[RequestKind, bytes]) -> None:
    kind, body = request_body
    if kind not in (RequestKind.COMPLETIONS, RequestKind.CHAT):
        return
    edge = read_json(kind, body)
    engine = None if edge is None else read_by_torch_engine(kind, edge.forwarded)
    if edge is not None and engine is not None and engine.max_tokens is not None:
        assert engine.forbidden == ()
        assert (engine.model, engine.stream) == (edge.model, edge.stream)
        assert engine.n == 1 or edge.is_alone


READERS = {
    "starlette": (nullcontext, read_by_starlette),
    "starlette, older": (older_options, read_by_starlette),
    "python-multipart": (nullcontext, read_by_python_multipart),
}


@pytest.mark.parametrize("reader", READERS)
@MANY
@given(forms())
def test_forms(reader: str, form: tuple[str, bytes]) -> None:
    content_type, body = form
    edge = read_form(content_type, body)
    if edge is None:
        return
    context, read = READERS[reader]
    with context():
        engine: FormReading | None = read(content_type, edge.forwarded)
    if engine is not None:
        assert _FORBIDDEN.isdisjoint(engine.names)
        assert engine.model == edge.model
