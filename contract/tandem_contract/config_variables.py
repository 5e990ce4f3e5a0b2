"""Variables of the environment in the credentials of a configuration file: `${NAME}`."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from .documents import Document

_VARIABLE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")


def resolve_credentials(
    document: Document, data: dict[str, Any], sections: Sequence[str], env: Mapping[str, str]
) -> None:
    """Replace `${VAR}` by the environment's value in every `credentials` of `sections`, at any
    depth. Raises DocumentError for a variable that is not set."""

    def walk(node: Any, path: tuple[str | int, ...]) -> Any:
        if isinstance(node, list):
            return [walk(value, (*path, i)) for i, value in enumerate(node)]
        if isinstance(node, dict):
            return {key: walk(value, (*path, key)) for key, value in node.items()}
        # Only in credentials: a `$` in any other field stays as it is written.
        if isinstance(node, str) and "credentials" in path:
            return _expand(document, path, node, env)
        return node

    for key in sections:
        if key in data:
            data[key] = walk(data[key], (key,))


def _expand(
    document: Document, path: tuple[str | int, ...], text: str, env: Mapping[str, str]
) -> str:
    for name in _VARIABLE.findall(text):
        if name not in env:
            raise document.error(path, f"${{{name}}} is not set in the environment: export {name}")
    return _VARIABLE.sub(lambda match: env[match[1]], text)
