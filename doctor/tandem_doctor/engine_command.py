"""Parses the command line of an engine."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import msgspec

from .facts import EngineCommand

_TRANSFER: Final = "kv-transfer-config"
_REFERENCE_ENGINE: Final = "tandem-engine"
_SHORT: Final = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-sc": "--speculative-config",
}
"""vLLM's short forms of the flags that the checks read."""
_VARIABLE: Final = re.compile(r"\$\(([^)]+)\)")


def parse_command(words: Sequence[str], environment: Mapping[str, str]) -> EngineCommand:
    """The flags of a vLLM or Tandem engine; expands `$(NAME)` as Kubernetes does.

    A --kv-transfer-config that is not a JSON object counts as empty: the engine would not start.
    """
    flags: dict[str, str] = {}
    expanded = [_SHORT.get(word) or _expand(word, environment) for word in words]
    # The final "--" is the successor of the last word.
    for word, following in pairwise([*expanded, "--"]):
        if not word.startswith("--") or word == "--":
            continue
        name, equals, value = word[2:].partition("=")
        if not equals:
            value = "true" if following.startswith("--") else following
        name = name.replace("_", "-")
        if value == "true" and name.startswith("no-"):
            name, value = name.removeprefix("no-"), "false"
        flags[name] = value
    if "model" not in flags and "serve" in expanded:
        flags["model"] = expanded[expanded.index("serve") + 1]
    # The first words: an interpreter may stand before the program.
    is_reference = any(word.rpartition("/")[2] == _REFERENCE_ENGINE for word in expanded[:3])
    transfer = _json(flags.get(_TRANSFER, "{}"))
    return EngineCommand(flags, transfer, dict(environment), is_reference=is_reference)


def _expand(word: str, environment: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda match: environment.get(match[1], match[0]), word)


def _json(text: str) -> Mapping[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.MsgspecError:
        return {}
