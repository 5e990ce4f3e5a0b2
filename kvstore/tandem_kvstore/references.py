"""Whether a decode engine may use the KvReference of a hand-off. Pure.

A decode engine derives the names of all objects from the prompt and its own settings, and uses a
reference only if it would write the same one. So a reference never chooses what is read.
"""

from collections.abc import Callable, Sequence

from tandem_contract.kv_reference import KvReference

from .chain import Chunk


def refusal(
    reference: KvReference, chunks: Sequence[Chunk], own: Callable[[Chunk], KvReference]
) -> str | None:
    """Why this engine does not use `reference`; None if it does.

    `chunks`: the full chunks of the prompt. `own`: the reference that this engine would write for
    the prefix that ends with a chunk.
    """
    mine = next((own(c) for c in chunks if c.token_count == reference.token_count), None)
    if mine is None or mine.prefix_hash != reference.prefix_hash:
        return "it is of another prompt, model, KV layout or setting"
    if mine.path != reference.path:
        return f"its path is not in the namespace of {mine.path.rpartition('/')[0]}"
    return None
