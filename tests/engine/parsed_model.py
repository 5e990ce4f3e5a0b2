"""A tiny model whose answer is one text, for engines that parse answers: reasoning, content, and a
call of the tool `count`.

Each token of the answer occurs once in it, and the head knows from the last token which one
follows. Some tokens are parts of a character.
"""

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tandem_engine.tiny import make_tiny_model

from .utf8_model import bytes_by_character

HIDDEN: Final = 128
_VOCAB: Final = 800
_SCALE: Final = 8.0
REASONING: Final = ("<think>", "Two", " lamps", *b"\xe6\x97\xa5", " and one", "</think>")
CONTENT: Final = ("I count", " them", *b"\xc3\xa9", ": ")
CALL: Final = (
    *("<tool_call>", '{"name": "', "cou", "nt", '", "arg', 'uments": {"of', '": "'),
    *(*b"\xf0\x9f\x9a\x80", 'ships", "n', '": 3', "1", "}", "}\n", "</tool_call>"),
)
_END: Final = "<|im_end|>"
_BEFORE: Final = "Ċ"
"""The last token of a chat's prompt, as the tokenizer writes a line break."""


def make_parsed_model(
    directory: Path, answer: Sequence[str | int] = (*REASONING, *CONTENT, *CALL)
) -> None:
    """Write the model, which answers each chat with these tokens; a number is a byte."""
    make_tiny_model(directory, layers=1, hidden=HIDDEN, vocab=_VOCAB)
    character = {byte: char for char, byte in bytes_by_character().items()}
    names = [character[part] if isinstance(part, int) else part for part in answer]
    file = directory / "tokenizer.json"
    written = json.loads(file.read_text())
    # Parsers look for their marks in the vocabulary.
    added = dict.fromkeys((*names, "<think>", "</think>"))
    new = iter([name for name in added if name not in written["model"]["vocab"]])
    for token in written["added_tokens"]:
        if token["content"].startswith("<|unused_"):
            token["content"] = next(new, token["content"])
    file.write_text(json.dumps(written))
    tokenizer = Tokenizer.from_file(str(file))
    ids = [tokenizer.token_to_id(name) for name in (_BEFORE, *names, _END)]
    weights = directory / "model.safetensors"
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor[:] = 0
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedding[:], head[:] = 0, 0
    # Any other token leads to the end.
    embedding[:, 0] = 1
    head[ids[-1], 0] = 1
    for dim, (token, following) in enumerate(pairwise(ids), 1):
        embedding[token] = 0
        embedding[token, dim] = 1
        head[following, dim] = _SCALE
    save_file(tensors, weights, {"format": "pt"})
