"""A run that is told to stop ends within seconds, with everything flushed and closed."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.loop.running import ROOT
from tests.sinks.wandb_reader import records

pytestmark = pytest.mark.engine
HOOKS = "mismatch_hooks={enabled: true, ablate_every: 1, time_budget: 1.0, sinks: [wandb, jsonl, console]}"


def test_sigterm_ends_a_run_with_hooks_within_seconds_and_nothing_is_lost(tmp_path: Path) -> None:
    settings = ["steps=100000", "wandb.mode=offline", HOOKS]
    overrides = [part for setting in settings for part in ("--set", setting)]
    recipe = "recipes/grpo_smollm2/tiny_llama.yaml"
    process = subprocess.Popen(
        [sys.executable, "-m", "mismatch_hooks", "run", recipe, "--out", str(tmp_path), *overrides],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    events = tmp_path / "events.jsonl"
    deadline = time.monotonic() + 120
    while not (events.exists() and events.read_text().count('"type":"verdict"') >= 2):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    stopped = time.monotonic()
    _, stderr = process.communicate(timeout=60)

    assert process.returncode == 143, stderr
    assert time.monotonic() - stopped < 15
    assert "Traceback" not in stderr
    written = [json.loads(line) for line in events.read_text().splitlines()]
    assert (written[-1]["type"], written[-1]["state"]) == ("run", "stopped")
    assert written[-1]["errors"] == {}
    assert any(record["type"] == "exit" for record in records(tmp_path / "wandb"))
