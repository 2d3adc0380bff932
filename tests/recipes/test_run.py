"""Whole runs of the tiny recipe on the real engines, each in a process of its own, as a user starts them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "grpo_smollm2"

# Runs the command and then names every module that a run without the hooks must not have loaded.
TRACELESS = """
import sys
from recipes.grpo_smollm2.train import command
code = command(sys.argv[1:])
print("loaded:", sorted(name for name in sys.modules if name.split(".")[0] == "mismatch_hooks"))
sys.exit(code)
"""


def started(*arguments: str, program: tuple[str, ...] = ("-m", "recipes.grpo_smollm2.train")) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *program, *arguments],
        cwd=ROOT,
        env={key: value for key, value in os.environ.items() if key != "WANDB_MODE"} | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(out: Path, *overrides: str, yaml: str = "tiny_llama.yaml", **how: Any) -> dict[str, Any]:
    """The run's ``result.json``, with what the process printed."""
    settings = [part for override in overrides for part in ("--set", override)]
    process = started(str(RECIPE / yaml), "--out", str(out), *settings, **how)
    stdout, stderr = process.communicate(timeout=240)
    assert process.returncode == 0, stderr
    result: dict[str, Any] = json.loads((out / "result.json").read_text(encoding="utf-8"))
    return result | {"out": out, "stdout": stdout, "stderr": stderr}


def outcome(result: dict[str, Any]) -> dict[str, Any]:
    """What two runs of one configuration must share; wall time is not part of it."""
    timeless = [{k: v for k, v in step.items() if k not in ("seconds", "phases")} for step in result["steps"]]
    return {"digests": result["digests"], "steps": timeless}


def group_is_gone(group: int, *, within_s: float) -> bool:
    """Whether no process of the group is left; an orphan that has ended waits a moment for init to collect it."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.2)
    return False


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run(tmp_path_factory.mktemp("plain"), program=("-c", TRACELESS))


@pytest.mark.engine
def test_a_run_without_hooks_and_wandb_leaves_no_trace_of_either(plain: dict[str, Any]) -> None:
    assert "loaded: []" in plain["stdout"]
    # megatron-core imports wandb by itself, so what counts is that no run was opened.
    assert [path.name for path in plain["out"].iterdir()] == ["result.json"]
    assert plain["completed"]
    assert len(plain["steps"]) == 4


@pytest.mark.engine
def test_a_person_sees_a_bar_a_line_a_step_and_where_the_results_are(plain: dict[str, Any]) -> None:
    lines = plain["stderr"].splitlines()
    steps = [line for line in lines if re.match(r"step +\d+  reward \d\.\d{3}  loss [+-]\d\.\d{4}  grad ", line)]
    assert len(steps) == 4
    assert any("4/4" in line for line in lines)
    assert "results in " in plain["stdout"]
    # One line of native code about memory binding cannot be silenced from here.
    others = [line for line in lines if "NUMA binding" not in line]
    assert len(others) <= 4 + 6, plain["stderr"]


@pytest.mark.engine
def test_the_same_seed_gives_the_same_run_to_the_bit(plain: dict[str, Any], tmp_path: Path) -> None:
    assert outcome(run(tmp_path)) == outcome(plain)


@pytest.mark.engine
def test_an_engine_core_in_its_own_process_samples_and_trains_the_same_to_the_bit(
    plain: dict[str, Any], tmp_path: Path
) -> None:
    apart = run(tmp_path, "rollout.engine_core_in_process=false")
    # An engine in this process draws from its global random stream now and then; nothing of the run depends on that.
    del apart["digests"]["rng"]
    assert outcome(apart)["digests"].items() <= plain["digests"].items()
    assert outcome(apart)["steps"] == outcome(plain)["steps"]


@pytest.mark.engine
def test_minibatches_divergence_and_tracking_work_together(tmp_path: Path) -> None:
    result = run(
        tmp_path,
        "grpo.minibatches=2",
        "grpo.kl_coefficient=0.1",
        "wandb.mode=offline",
        "seed=1",
        yaml="tiny_qwen3.yaml",
    )
    losses = [step["loss"] for step in result["steps"]]
    assert all(abs(loss) > 0 for loss in losses)
    written = next(tmp_path.glob("wandb/offline-run-*"))
    records = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(written)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert records.count("train/reward") >= 4


@pytest.mark.engine
@pytest.mark.parametrize(
    ("sent", "code", "in_process"),
    [
        pytest.param(signal.SIGINT, 130, "true", id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, "false", id="SIGTERM with an engine core in its own process"),
    ],
)
def test_a_stopped_run_ends_within_seconds_and_leaves_no_process(
    tmp_path: Path, sent: signal.Signals, code: int, in_process: str
) -> None:
    settings = ["steps=100000", f"rollout.engine_core_in_process={in_process}", "wandb.mode=offline"]
    process = started(
        str(RECIPE / "tiny_llama.yaml"), "--out", str(tmp_path), *(p for s in settings for p in ("--set", s))
    )
    result, deadline = tmp_path / "result.json", time.monotonic() + 200
    while not result.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    assert result.exists(), process.communicate()[1]

    # Ctrl-C reaches everything in the terminal, a service manager's signal the process that it started.
    os.killpg(process.pid, sent) if sent is signal.SIGINT else os.kill(process.pid, sent)
    stopped = time.monotonic()
    _, stderr = process.communicate(timeout=30)

    assert process.returncode == code, stderr
    assert time.monotonic() - stopped < 15
    assert f"stopped; what was done until then is in {tmp_path}" in stderr
    assert "Traceback" not in stderr
    assert json.loads(result.read_text(encoding="utf-8"))["completed"] is False
    assert group_is_gone(process.pid, within_s=10)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param(
            [str(RECIPE / "tiny_llama.yaml"), "--set", "grpo.minibatch=2"],
            "grpo.minibatch: unknown key; accepts epsilon_low, epsilon_high, kl_coefficient, minibatches. "
            "Did you mean 'minibatches'?\n",
            id="unknown key",
        ),
        pytest.param(
            [str(RECIPE / "tiny_llama.yaml"), "--set", "mismatch_hooks={enabled: true, origin: alligned}"],
            "mismatch_hooks.origin: got 'alligned'; accepts aligned, native, both. Did you mean 'aligned'?\n",
            id="wrong value in the hooks' section",
        ),
        pytest.param(["none.yaml"], "none.yaml: no such file; give the path of a recipe's YAML file.\n", id="no file"),
    ],
)
def test_a_wrong_call_says_one_sentence_and_exits_2(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    process = started(*arguments, "--out", str(tmp_path / "out"))
    stdout, stderr = process.communicate(timeout=60)
    assert (process.returncode, stdout, stderr) == (2, "", sentence)
    assert not (tmp_path / "out").exists()
