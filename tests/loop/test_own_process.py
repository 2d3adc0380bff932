"""The same code serves an engine core that lives in a process of its own."""

import pytest

from tests.loop.running import HOOKS_ON, Run, run

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def separate(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two steps with the engine core elsewhere."""
    folder = tmp_path_factory.mktemp("own_process")
    return run("tiny_llama", folder, "steps=2", "rollout.engine_core_in_process=false", HOOKS_ON)


def test_capture_readback_and_the_four_arms_work_across_processes(separate: Run) -> None:
    assert separate.exit_code == 0, separate.stderr
    assert [step["metrics"]["token_coverage"] for step in separate.events("step")] == [1.0, 1.0]
    verdicts = {verdict["factor"]: verdict for verdict in separate.events("verdict")}
    closed = {
        (factor, name): gate["reason"]
        for factor, verdict in verdicts.items()
        for name, gate in verdict["gates"].items()
        if not gate["ok"]
    }
    # Requests reach an engine in another process one by one, so no batch of a given size can be asked of it.
    assert {factor for factor, _ in closed} <= {"rollout.batch_size"}, closed
    verdict = verdicts["attention.rope_fusion"]
    assert {name: gate["ok"] for name, gate in verdict["gates"].items()} == {
        "switch_effective": True,
        "evidence_complete": True,
        "shards_complete": True,
        "pitfalls_clear": True,
    }
    assert set(verdict["arms"]) == {
        "both_native",
        "both_reference",
        "rollout_reference_only",
        "training_reference_only",
    }
    assert separate.events("error") == []


def test_settings_are_read_from_the_other_process(separate: Run) -> None:
    settings = separate.events("readback")[0]["settings"]
    theta = settings["model.rope.theta"]
    assert theta["rollout"]["effective"] == pytest.approx(10000.0)
    assert theta["rollout"]["source"] == "live module"
    assert settings["operator.attention.implementation"]["rollout"]["effective"] == "CPUAttentionBackendImpl"
