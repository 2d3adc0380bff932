"""A real offline W&B run of the whole loop, opened by the host, read back by W&B's own reader."""

import pytest

from tests.loop.running import Run, run
from tests.sinks.wandb_reader import rows, series

pytestmark = pytest.mark.engine
HOOKS = "mismatch_hooks={enabled: true, ablate_every: 1, time_budget: 1.0, sinks: [wandb, jsonl]}"


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Four steps, ablated from the second one on."""
    return run("tiny_llama", tmp_path_factory.mktemp("tracked"), "wandb.mode=offline", HOOKS)


def test_every_series_of_ours_has_every_step_and_no_row_of_the_hosts_is_lost(tracked: Run) -> None:
    assert tracked.exit_code == 0, tracked.stderr
    (offline,) = (tracked.folder / "wandb").glob("offline-run-*")
    found = rows(offline)
    wanted = [(event["step"], event["metrics"]["clip_fraction"]) for event in tracked.events("step")]
    assert series(found, "mismatch/clip_fraction", over="mismatch/step") == wanted
    overhead = series(found, "hooks/overhead_fraction", over="mismatch/step")
    assert [step for step, _ in overhead] == [0, 1, 2, 3]
    rewards = [step["reward"] for step in tracked.result["steps"]]
    assert [value for _, value in series(found, "train/reward", over="_step")] == pytest.approx(rewards)


def test_gates_and_verdicts_are_series(tracked: Run) -> None:
    (offline,) = (tracked.folder / "wandb").glob("offline-run-*")
    found = rows(offline)
    gate = "gate/attention.rope_fusion/native/switch_effective"
    assert series(found, gate, over="mismatch/step") == [(1, 1), (2, 1), (3, 1)]
    assert [step for step, _ in series(found, "verdict/attention.rope_fusion/native", over="mismatch/step")] == [
        1,
        2,
        3,
    ]
