"""When a run with a time limit stops."""

from pathlib import Path

import pytest

from recipes.grpo_smollm2.session import Record


@pytest.mark.parametrize(
    ("elapsed_s", "limit_s", "expected"),
    [
        pytest.param(99.0, 0.0, False, id="no limit"),
        pytest.param(7.9, 10.0, False, id="the longest step still fits, its hooks left out"),
        pytest.param(8.1, 10.0, True, id="it no longer does"),
    ],
)
def test_no_step_begins_that_would_end_after_the_limit(elapsed_s: float, limit_s: float, expected: bool) -> None:
    phases = [{"sample": 1.5, "hooks": 9.0, "forward": 0.5}, {"sample": 1.0}]
    record = Record(path=Path("unused"), steps=[{"phases": one} for one in phases])
    assert record.would_end_late(elapsed_s, limit_s=limit_s) is expected


def test_the_first_step_always_begins() -> None:
    assert not Record(path=Path("unused")).would_end_late(99.0, limit_s=1.0)
