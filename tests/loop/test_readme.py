"""The README's example runs as it is printed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loop.running import ROOT

pytestmark = pytest.mark.engine


def test_the_example_of_the_readme_runs_over_two_real_engines_and_measures(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.loop.readme_example", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    metrics = [event["metrics"] for event in events if event["type"] == "step"]
    assert [found["token_coverage"] for found in metrics] == [1.0, 1.0]
    assert 0 < metrics[0]["dlogp_mean"] < 0.2
    assert [event["state"] for event in events if event["type"] == "run"] == ["started", "finished"]
