"""A wrong rope base planted into the rollout engine is alerted, accused on the right side, and read back."""

import pytest

from tests.loop.running import Run, run

pytestmark = pytest.mark.engine
STEP = 6


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Healthy until step 6, then with a wrong rotary table; an alert asks for an ablation out of turn."""
    hooks = (
        "mismatch_hooks={enabled: true, ablate_every: 100, time_budget: 1.0, origin: both, sinks: [jsonl], "
        "alerts: {clip_fraction: {window: 5, min_steps: 5}}}"
    )
    settings = ("steps=9", f"inject=rope_theta@{STEP}", "task.prompts=4", "task.max_response_tokens=32", hooks)
    return run("tiny_llama", tmp_path_factory.mktemp("planted"), *settings)


def test_the_alert_opens_at_the_planted_step(planted: Run) -> None:
    assert planted.exit_code == 0, planted.stderr
    opened = [
        alert for alert in planted.events("alert") if alert["kind"] == "clip_fraction" and alert["state"] == "opened"
    ]
    assert [alert["step"] for alert in opened] == [STEP]


def test_the_alert_brings_an_ablation_forward_and_the_verdict_accuses_rope_on_rollout(planted: Run) -> None:
    rope = [verdict for verdict in planted.events("verdict") if verdict["factor"] == "attention.rope_fusion"]
    aligned, native, *_ = [verdict for verdict in rope if verdict["step"] > STEP]
    assert (native["origin"], native["step"], native["diagnosis"]) == ("native", STEP + 1, "caused_by_rollout_side")
    assert "rollout" in native["recommendation"]
    # To the bit the trainer's rope departs too, by its rounding; the sizes tell who is wrong and who only rounds.
    assert (aligned["origin"], aligned["step"], aligned["diagnosis"]) == ("aligned", STEP + 1, "caused_by_both_sides")
    departs = {arm: aligned["arms"][arm]["dlogp_mean"] for arm in ("training_reference_only", "rollout_reference_only")}
    assert departs["training_reference_only"] > 10 * departs["rollout_reference_only"] > 0.0


def test_the_readback_shows_requested_beside_effective(planted: Run) -> None:
    latest = planted.events("readback")[-1]
    theta = latest["settings"]["model.rope.theta"]["rollout"]
    assert theta["requested"] == 10000.0
    assert theta["effective"] != pytest.approx(10000.0, rel=0.01)
    assert "model.rope.theta" in [difference["key"] for difference in latest["differences"]]
