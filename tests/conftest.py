"""Settings that hold for every test."""

import pytest
from hypothesis import settings

# A shared two-core host misses any deadline now and then, and a run must be repeatable.
settings.register_profile("repeatable", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a table cuts off depends on the terminal, and a worker process has none."""
    monkeypatch.setenv("COLUMNS", "100")
