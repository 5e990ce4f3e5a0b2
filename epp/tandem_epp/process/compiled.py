"""Whether the request path runs compiled: images contain it so, a checkout and a wheel do not."""

from types import ModuleType

from ..placement import picker


def is_compiled(module: ModuleType = picker) -> bool:
    """Whether `module` was made by `python -m images.hot_path`."""
    return not (module.__file__ or "").endswith(".py")
