"""Requests are tokenized for the model that they name."""

import json
from collections import Counter
from pathlib import Path

import pytest

from tandem_contract.prompt_length import ANY_VOCABULARY
from tandem_contract.request_kinds import RequestKind
from tandem_engine.text import Tokenizer
from tandem_engine.tiny import make_tiny_model
from tandem_epp.prefix.tokenization.models import ModelTokenizers
from tandem_epp.prefix.tokenization.tokenizer import TokenizerSettings

from ....engine.engines import tiny_model

TEXT = "Which ship finds harbour?"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """A model with other tokens."""
    make_tiny_model(tmp_path, layers=1, vocab=300)
    return tmp_path


async def test_each_model_has_its_own_tokens(other: Path) -> None:
    results = Counter[str]()
    tokenizers = ModelTokenizers(
        [
            TokenizerSettings(str(tiny_model()), model="big", adapters=("sql",), deadline=60.0),
            TokenizerSettings(str(other), model="small", deadline=60.0),
        ],
        lambda result, _: results.update([result]),
    )

    async def tokens(**fields: object) -> tuple[list[int], str | None] | None:
        body = json.dumps({"prompt": TEXT, **fields}).encode()
        prompt = await tokenizers.tokenize(RequestKind.COMPLETIONS, body)
        return (list(prompt.token_ids), prompt.adapter) if prompt is not None else None

    big, small = (list(Tokenizer(model).encode(TEXT)) for model in (tiny_model(), other))
    assert big != small
    assert await tokens(model="big") == (big, None)
    assert await tokens(model="small") == (small, None)
    assert await tokens(model="sql") == (big, "sql")
    assert await tokens(model="small", prompt=[1, 2]) == ([1, 2], None)
    assert await tokens(model="unknown") is None
    assert await tokens() is None
    assert results == {"tokenized": 3, "given": 1, "refused": 2}
    assert tokenizers.sizes("sql") == Tokenizer(tiny_model()).sizes
    assert tokenizers.sizes("small") == Tokenizer(other).sizes
    assert tokenizers.sizes("unknown") == ANY_VOCABULARY
    await tokenizers.close()


async def test_one_that_cannot_be_used_leaves_the_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizers = ModelTokenizers(
        [
            TokenizerSettings(str(tmp_path / "none"), model="gone"),
            TokenizerSettings(str(tiny_model()), model="here", deadline=60.0),
        ],
        lambda *_: None,
    )
    assert "none/tokenizer.json: cannot read it" in caplog.text
    for model, is_known in (("gone", False), ("here", True)):
        body = json.dumps({"model": model, "prompt": TEXT}).encode()
        prompt = await tokenizers.tokenize(RequestKind.COMPLETIONS, body)
        assert (prompt is not None) is is_known
    ids = await tokenizers.tokenize(RequestKind.COMPLETIONS, b'{"model": "gone", "prompt": [7]}')
    assert ids is not None
    await tokenizers.close()
