"""Which tests share a worker when pytest-xdist runs several; loaded as a plugin by the root conftest.

A live engine takes up to ten seconds to start, and a worker cannot lend its own to another one. So the tests
that share session-wide engines stay together, all others by file. Tests that run whole programs come first, while the
workers are still small; short ones come last and fill what is left.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[1]


def _file(node_id: str) -> str:
    return node_id.split("::", 1)[0]


@cache
def _scope(file: str) -> str:
    """The tests that have to run in one worker: those of a file, or of all files with the same engines."""
    if file.startswith("tests/integrations/vllm/"):
        return "engines of tests/integrations/vllm/conftest.py"
    # By its text: a test may ask for the fixture of a shape by name while it runs.
    if any(fixture in (_ROOT / file).read_text(encoding="utf-8") for fixture in ("llama_engines", "qwen3_engines")):
        return "engines of tests/tiny_engines.py"
    return file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Hand out the tests of one scope together."""
    from xdist.scheduler import LoadScopeScheduling

    class ByEngine(LoadScopeScheduling):  # type: ignore[misc]  # xdist ships no types
        def _split_scope(self, nodeid: str) -> str:
            return _scope(_file(nodeid))

    return ByEngine(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put programs first, then shared engines, then the rest; a run without workers keeps its order."""
    if hasattr(config, "workerinput"):
        items.sort(key=_turn)


def _turn(item: pytest.Item) -> int:
    if item.get_closest_marker("engine") is None:
        return 2
    return 1 if _scope(_file(item.nodeid)).startswith("engines of ") else 0
