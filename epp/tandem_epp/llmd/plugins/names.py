"""The message for a name that does not exist."""

from collections.abc import Collection
from difflib import get_close_matches


def unknown_name(what: str, name: str, names: Collection[str]) -> str:
    """The message for a `name` that is not among `names`, with the most similar of them."""
    similar = get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean {similar[0]!r}?" if similar else f"known: {', '.join(sorted(names))}"
    return f"unknown {what} {name!r}; {hint}"
