import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tandem_engine.tiny import SPECIAL_TOKENS, TinyModelError, make_tiny_model

from .dense import DenseLlama
from .engines import expected, prompt, tiny_model


def test_the_same_bytes_each_time_and_others_for_another_seed(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_tiny_model(tmp_path / name, seed=seed, layers=1, hidden=16, heads=2, kv_heads=1)
    files = sorted(file.name for file in (tmp_path / "a").iterdir())
    same = [(tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files]
    assert files == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert all(same)
    weights = [(tmp_path / name / "model.safetensors").read_bytes() for name in "ac"]
    assert weights[0] != weights[1]


@pytest.mark.parametrize("vocab", [260, 300, 512, 2000])
def test_the_tokenizer_has_the_models_vocabulary_and_loses_nothing(
    tmp_path: Path, vocab: int
) -> None:
    make_tiny_model(tmp_path, vocab=vocab, layers=1, hidden=16, heads=2, kv_heads=1)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "Grüße, 世界! \x00\n  <|im_start|>user\n"
    ids = tokenizer.encode(text).ids
    assert tokenizer.get_vocab_size() == vocab
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert [tokenizer.token_to_id(token) for token in SPECIAL_TOKENS] == [0, 1, 2, 3]
    assert "chat_template" in json.loads((tmp_path / "tokenizer_config.json").read_text())


def test_answers_vary_and_depend_on_what_stands_far_back() -> None:
    answer = expected(prompt(60), 30)
    assert len(set(answer)) > 15
    changed = (prompt(60)[0] ^ 1, *prompt(60)[1:])
    assert expected(changed, 30) != answer


def test_the_best_token_stands_clear_of_the_next() -> None:
    """Far above what the order of float64 additions can change."""
    dense = DenseLlama(tiny_model())
    best = dense.logits(list(prompt(200))).topk(2).values
    assert float((best[:, 0] - best[:, 1]).min()) > 1e-4
    assert float((best[:, 0] - best[:, 1]).median()) > 0.1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"vocab": 200}, "take 260"),
        ({"hidden": 100, "heads": 3}, "must divide"),
        ({"heads": 4, "kv_heads": 3}, "must divide"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(
    tmp_path: Path, sizes: dict[str, int], message: str
) -> None:
    with pytest.raises(TinyModelError, match=message):
        make_tiny_model(tmp_path / "m", **sizes)
    assert not (tmp_path / "m").exists()
