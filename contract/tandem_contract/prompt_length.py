"""Prompts that cannot fit a model's length, told by their text alone. Pure.

The rule is vLLM's own (`TokenizeParams._text_len_check`): a text of more characters than
`max_model_len` of the longest tokens is refused without being tokenized. Who has a tokenizer knows
its longest token; others assume `LONGEST_TOKEN`.
"""

from typing import Final

LONGEST_TOKEN: Final = 256
"""Characters of the longest token of any model. The vocabularies of Llama 3, Qwen, DeepSeek and
gpt-oss end at 128 characters: runs of spaces or of one sign. Too low: prompts that fit are refused.
Too high: more prompts that cannot fit reach an engine, which refuses them itself."""


def over_length(characters: int, max_model_len: int, longest_token: int) -> str | None:
    """The error for a prompt with a text of so many characters; None: it may fit.

    `max_model_len` is in tokens, `longest_token` in characters.
    """
    limit = max_model_len * longest_token
    if characters <= limit:
        return None
    return (
        f"This model's maximum context length is {max_model_len} tokens. However, your prompt"
        f" contains {characters} characters, and {max_model_len} tokens have at most {limit}."
        " Please reduce the length of the prompt."
    )
