"""helm and promtool are had before the first test; where they cannot be, the summary says so."""

import pytest

from tests.cluster import tools

from . import programs

_MISSING = pytest.StashKey[dict[str, str]]()


def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    config.stash[_MISSING] = {}
    wanted = {name for item in session.items for name in getattr(item, "fixturenames", ())}
    if config.option.collectonly:
        return
    provide = {
        "helm": lambda: tools.ensure(("helm",), print),
        "promtool": programs.ensure_promtool,
    }
    for name in wanted & provide.keys():
        try:
            provide[name]()
        except tools.MissingTool as missing:
            config.stash[_MISSING][name] = str(missing)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for name, why in terminalreporter.config.stash.get(_MISSING, {}).items():
        terminalreporter.section(f"CHART TESTS SKIPPED: NO {name.upper()}", red=True)
        terminalreporter.line(why)


@pytest.fixture(scope="session")
def helm(request: pytest.FixtureRequest) -> None:
    """helm is there."""
    _skip_without("helm", request.config)


@pytest.fixture(scope="session")
def promtool(request: pytest.FixtureRequest) -> None:
    """promtool is there."""
    _skip_without("promtool", request.config)


def _skip_without(name: str, config: pytest.Config) -> None:
    if (why := config.stash[_MISSING].get(name)) is not None:
        pytest.skip(why)
