"""A tiny model whose greedy answers are valid UTF-8 with many characters of several tokens.

The tiny model draws from bytes that rarely are text. This one is the same, but some dimensions of
the residual stream carry the last token's part of a character, and the head forbids every token
that cannot follow it. Which of the others comes depends on all tokens before, as in the tiny model.
"""

from itertools import product
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tandem_engine.tiny import make_tiny_model

HIDDEN: Final = 128
_WHOLE: Final = "whole"
_OTHER: Final = "other"
_BYTES: Final = {
    "lead of 3": range(0xE4, 0xE9),
    "second of 3": range(0x80, 0x98),
    "lead of 4": (0xF0,),
    "second of 4": (0x9F,),
    "third of 4": (0x98, 0x9A),
    "last": range(0xA0, 0xC0),
}
"""Part of a character → the tokens of one byte that may be it; no byte may be two parts. The
characters are U+4020 to U+85FF, U+1F620 to U+1F63F and U+1F6A0 to U+1F6BF."""
_BEGIN: Final = (_WHOLE, "lead of 3", "lead of 4")
_FOLLOW: Final = {
    _WHOLE: _BEGIN,
    _OTHER: _BEGIN,
    "last": _BEGIN,
    "lead of 3": ("second of 3",),
    "second of 3": ("last",),
    "lead of 4": ("second of 4",),
    "second of 4": ("third of 4",),
    "third of 4": ("last",),
}
_SCALE: Final = 8.0
_FORBIDDEN: Final = -200.0
_FAVOURED: Final = 2.0
"""Added to the logit of a lead: about half of the characters have several tokens."""


def make_utf8_model(directory: Path) -> None:
    """Write the model; the same bytes each time."""
    make_tiny_model(directory, layers=2, hidden=HIDDEN)
    file = directory / "model.safetensors"
    tensors, parts = load_file(file), list(_FOLLOW)
    of_token = _parts(Tokenizer.from_file(str(directory / "tokenizer.json")))
    dims = slice(HIDDEN - len(parts), HIDDEN)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[dims] = 0
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedding[:, dims], head[:, dims] = 0, 0
    for token, (dim, part) in product(range(len(of_token)), enumerate(parts, dims.start)):
        if of_token[token] == part:
            embedding[token, dim] = _SCALE
        if of_token[token] not in _FOLLOW[part]:
            head[token, dim] = _FORBIDDEN
        elif of_token[token].startswith("lead"):
            head[token, dim] = _FAVOURED
    save_file(tensors, file, {"format": "pt"})


def _parts(tokenizer: Tokenizer) -> list[str]:
    """Which part of a character each token is."""
    byte_of = bytes_by_character()
    part_of = {byte: part for part, those in _BYTES.items() for byte in those}

    def part(token: str) -> str:
        data = bytes(byte_of.get(char, 0xFF) for char in token)
        if len(data) == 1 and data[0] in part_of:
            return part_of[data[0]]
        return _WHOLE if data.isascii() and data.decode().isprintable() else _OTHER

    special = tokenizer.get_added_tokens_decoder()
    size = tokenizer.get_vocab_size()
    return [_OTHER if i in special else part(tokenizer.id_to_token(i)) for i in range(size)]


def bytes_by_character() -> dict[str, int]:
    """The characters with which a byte-level tokenizer writes bytes (GPT-2's)."""
    same = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in same]
    return {chr(b): b for b in same} | {chr(0x100 + i): b for i, b in enumerate(others)}
