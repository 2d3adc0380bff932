"""Which tests share a worker when pytest-xdist runs several; loaded as a plugin by the root conftest.

A live engine takes up to ten seconds and 2 GB to start, and a worker cannot lend its own to another one. So the tests
that share session-wide engines stay together, all others by file. Tests that run whole programs come first, while the
workers are still small; short ones come last and fill what is left.
"""

from typing import Any

import pytest


def _scope(node_id: str) -> str:
    """The tests that have to run in one worker: those of a file, or of all files with the same engines."""
    file = node_id.split("::", 1)[0]
    if file.startswith("tests/integrations/vllm/"):
        return "engines of tests/integrations/vllm/conftest.py"
    if file.endswith("/tests/test_engines.py"):
        return "engines of tests/tiny_engines.py"
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out the tests of one scope together."""
    from xdist.scheduler import LoadScopeScheduling

    class ByEngine(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
        def _split_scope(self, nodeid: str) -> str:
            return _scope(nodeid)

    return ByEngine(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put programs first, then shared engines, then the rest; a run without workers keeps its order."""
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if not item.get_closest_marker("engine"):
        return 2
    return 1 if _scope(item.nodeid).startswith("engines of ") else 0
