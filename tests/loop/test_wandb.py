"""W&B runs of the whole loop, opened by the host: offline, read back by W&B's own reader, and online, to a server."""

from pathlib import Path

import pytest

from tests.loop.running import Run, run
from tests.loop.wandb_server import wandb_server
from tests.sinks.wandb_reader import rows, series

pytestmark = pytest.mark.engine
HOOKS = "mismatch_hooks={enabled: true, ablate_every: 1, time_budget: 1.0, origin: native, sinks: [wandb, jsonl]}"


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


def test_online_the_same_series_and_the_alerts_reach_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with wandb_server() as received:
        monkeypatch.setenv("WANDB_BASE_URL", received.address)
        online = run("tiny_llama", tmp_path, HOOKS)
    assert online.exit_code == 0, online.stderr
    assert received.complete
    wanted = [(event["step"], event["metrics"]["clip_fraction"]) for event in online.events("step")]
    assert series(received.history, "mismatch/clip_fraction", over="mismatch/step") == wanted
    assert [step for step, _ in series(received.history, "train/reward", over="_step")] == [0, 1, 2, 3]
    assert [alert["title"] for alert in received.alerts] == [event["title"] for event in online.events("alert")]
    assert not list((tmp_path / "wandb").glob("offline-run-*"))
