"""Small tokenizers of the kinds that models have, made here: no file from elsewhere is needed."""

import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tandem_loadtest.workload.text import WORDS

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character that sentencepiece puts in the place of a space."""


def corpus() -> list[str]:
    """Lines that contain every word at the start and within, in a random order."""
    generator = random.Random(0)
    return [" ".join(generator.sample(WORDS, k=len(WORDS))) + "." for _ in range(60)]


def bytes_only() -> Tokenizer:
    """A token for each byte, as a model for tests has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_level(vocab: int) -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have; a small `vocab` splits words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus(),
        trainers.BpeTrainer(
            vocab_size=vocab,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return tokenizer


def with_start_token(tokenizer: Tokenizer) -> Tokenizer:
    """The same, with `<s>` in front of each text."""
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def sentencepiece_bpe(vocab: int) -> Tokenizer:
    """BPE over text whose spaces are replaced, without pre-tokenizer, as Llama 2 and Mistral."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        corpus(), trainers.BpeTrainer(vocab_size=vocab, show_progress=False)
    )
    trained.pre_tokenizer = pre_tokenizers.Sequence([])
    trained.normalizer = normalizers.Sequence(
        [normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)]
    )
    return with_start_token(trained)


def unigram(vocab: int) -> Tokenizer:
    """A unigram language model of sentencepiece, as T5 and Gemma's predecessors have."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(
        corpus(),
        trainers.UnigramTrainer(
            vocab_size=vocab, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False
        ),
    )
    return tokenizer


def word_crossing() -> Tokenizer:
    """BPE whose tokens span words: the tokens of a text are not the sum of those of its words."""
    generator = random.Random(1)
    tokenizer = Tokenizer(models.BPE())
    lines = [" ".join(generator.choices(WORDS[:12], k=200)) for _ in range(200)]
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=600, show_progress=False))
    return tokenizer


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "bytes": bytes_only,
    "byte-level": lambda: byte_level(2000),
    "byte-level, words split": lambda: with_start_token(byte_level(400)),
    "sentencepiece": lambda: sentencepiece_bpe(2000),
    "sentencepiece, words split": lambda: sentencepiece_bpe(120),
    "unigram": lambda: unigram(400),
}


def write(folder: Path, tokenizer: Tokenizer) -> Path:
    """The folder with the tokenizer's file in it."""
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder
