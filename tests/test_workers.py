"""How tests are dealt to workers: what shares an engine stays together, everything else by file."""

from pathlib import Path

import pytest

from tests.workers import _scope

ROOT = Path(__file__).parents[1]


def test_all_tests_of_the_tiny_engines_share_a_worker() -> None:
    files = [f"mismatch_hooks/operator_checks/{name}/tests/test_engines.py" for name in ("embedding", "norm")]
    assert {_scope(file) for file in files} == {"engines of tests/tiny_engines.py"}


def test_all_tests_of_vllms_folder_share_another_worker() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "tests/integrations/vllm").glob("test_*.py")]
    assert len(files) > 1
    assert {_scope(file) for file in files} == {"engines of tests/integrations/vllm/conftest.py"}


@pytest.mark.parametrize("file", ["tests/loop/test_stop.py", "tests/pipeline/test_metrics.py"])
def test_others_are_dealt_by_file(file: str) -> None:
    assert _scope(file) == file
