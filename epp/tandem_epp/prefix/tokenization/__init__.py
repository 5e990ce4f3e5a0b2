"""Token ids of prompts, for the precise prefix index.

`source` reads from a body what is to be tokenized; `local` does it with a model directory's files,
in threads; `render` asks vLLM's render endpoint; `tokenizer` chooses among them, caches, and gives
up at a deadline; `models` has one for each model. What the ids are used for belongs to `precise`.
Read `tokenizer` first.

Errors:

    Exception
    ├── TokenizerUnusable     the model directory cannot be used; raised when it is loaded
    └── NotTokenized          this prompt cannot be tokenized; its request is placed without
"""


class TokenizerUnusable(Exception):
    """A tokenizer's file is missing or malformed; the message names it."""


class NotTokenized(Exception):
    """The prompt cannot be tokenized here; the message says why, without any of its text."""
