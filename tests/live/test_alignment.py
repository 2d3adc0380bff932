"""What aligning does to a run that goes wrong: refused at the start, never in the way afterwards."""

from pathlib import Path

import pytest

from mismatch_hooks.live.config import ConfigError, check_config
from mismatch_hooks.pipeline.bind import BindingError
from tests.fake_engines import FACTOR, FakeEngine
from tests.live.test_hooks import ROLLOUT, TRAINING, Loop

ALIGNED = {"align": [FACTOR], "ablate_every": 0}


def test_an_operator_that_cannot_be_held_stops_the_start_and_leaves_nothing_bound(tmp_path: Path) -> None:
    rollout = FakeEngine(ROLLOUT)
    training = FakeEngine(TRAINING, fail={"hold": BindingError("the graph was captured.")})
    with pytest.raises(BindingError, match="the graph was captured"):
        Loop(tmp_path, rollout, training, config=ALIGNED)
    assert (rollout.bound, training.bound) == (None, None)


def test_both_sides_are_held_while_the_run_lasts_and_put_back_at_its_end(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING), config=ALIGNED)
    loop.step(0)
    assert all(engine.bound is not None and FACTOR in engine.bound.choices for engine in (loop.rollout, loop.training))
    (step,) = loop.events("step")
    assert (loop.rollout.bound, loop.training.bound) == (None, None)
    assert step["metrics"]["unequal_tokens"] == 0 and "not_measured" not in step["metrics"]


def test_values_that_the_trainer_does_not_give_again_are_not_called_measured(tmp_path: Path) -> None:
    # The loop hands over what the rollout sampled; the trainer itself, on its reference too, has other values.
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING, other_error=0.01), config=ALIGNED)
    loop.computes = loop.rollout
    loop.step(0)
    (step,) = loop.events("step")
    assert (step["metrics"]["bitwise_fraction"], step["metrics"]["not_measured"]) == (1.0, 1.0)


def test_a_step_that_is_not_equal_is_named_and_alerted_without_a_trace_where_none_can_be_had(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT, native_error=0.01), FakeEngine(TRAINING), config=ALIGNED)
    for step in range(3):
        loop.step(step)
    started, *unequal = loop.events("alignment")
    assert started["operators"] == {side: {FACTOR: "fp32"} for side in ("rollout", "training")}
    assert [event["step"] for event in unequal] == [0, 1, 2]
    assert unequal[0]["unequal"] > 0 and len(unequal[0]["first"]) == 8
    assert unequal[0]["where"].startswith("not traced: TracingError: the rollout engine is a FakeEngine")
    alerts = [alert for alert in loop.events("alert") if alert["kind"] == "alignment"]
    assert [(alert["step"], alert["state"]) for alert in alerts] == [(0, "opened")]
    assert loop.events("error") == []


def test_operators_that_cannot_be_held_again_after_an_ablation_end_ablation_and_not_the_run(tmp_path: Path) -> None:
    loop = Loop(tmp_path, FakeEngine(ROLLOUT), FakeEngine(TRAINING), config={**ALIGNED, "ablate_every": 1})
    loop.step(0)
    loop.training.fail["hold"] = BindingError("somebody compiled it.")
    for step in (1, 2, 3):
        loop.step(step)
    (error,) = loop.events("error")
    assert "mismatch_hooks.align is not in force any more: somebody compiled it." in error["message"]
    assert {verdict["step"] for verdict in loop.events("verdict")} == {1}
    assert (loop.rollout.bound, loop.training.bound) == (None, None)
    assert loop.events("run")[-1]["ablation"]["off"].startswith("mismatch_hooks.align is not in force")


def test_several_trainer_ranks_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^mismatch_hooks\.align: got \('attention.* with 2 trainer ranks"):
        Loop(
            tmp_path,
            FakeEngine(ROLLOUT),
            FakeEngine(TRAINING),
            config=ALIGNED,
            world_size=2,
            gather=lambda plain: [plain],
        )


@pytest.mark.parametrize("given", [1, {"norm.rmsnorm": True}, [1]])
def test_align_takes_names(given: object) -> None:
    with pytest.raises(ConfigError, match=r"^mismatch_hooks\.align: got .*; accepts all, or a list of factor ids"):
        check_config({"align": given})
