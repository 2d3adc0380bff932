"""A run that keeps operators on their references has no mismatch at all: every token of every step, syncs included."""

from pathlib import Path

import pytest

from tests.loop.running import ROOT, Run, run

pytestmark = pytest.mark.engine

# Ablating in between, which puts the operators back for as long as it takes.
ALIGNED = (
    "mismatch_hooks={enabled: true, align: all, ablate_every: 3, time_budget: 1.0, sinks: [jsonl], "
    "factors: [norm.rmsnorm]}"
)


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_qwen3"])
def aligned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run(request.param, tmp_path_factory.mktemp(request.param) / "aligned", ALIGNED, "steps=8")


def test_every_step_is_zero_to_the_bit(aligned: Run) -> None:
    assert aligned.exit_code == 0, aligned.stderr
    steps = [event["metrics"] for event in aligned.events("step")]
    assert len(steps) == 8
    for metrics in steps:
        assert (metrics["dlogp_max"], metrics["bitwise_fraction"], metrics["unequal_tokens"]) == (0.0, 1.0, 0)
        assert metrics["tokens"] > 0 and "not_measured" not in metrics


def test_it_is_no_copy_and_the_weights_moved(aligned: Run) -> None:
    verdicts = aligned.events("verdict")
    assert [verdict["step"] for verdict in verdicts] == [3, 6]
    for verdict in verdicts:
        # From the origin that the run itself has, native norms differ all the same: the equality is the references'.
        assert verdict["diagnosis"] == "caused_by_rollout_side", verdict["reason"]
        assert verdict["paths"]["live_against_prefill"]["bitwise_fraction"] == 1.0
        assert verdict["paths"]["training_rescore"]["bitwise_fraction"] == 1.0
    digests = {event["weights"]["training"]["digest"] for event in aligned.events("step")}
    assert len(digests) == 8


def test_the_run_says_what_it_holds_and_what_it_proved(aligned: Run) -> None:
    (opening,) = aligned.events("alignment")
    assert opening["step"] is None and "attention.kernel" in opening["operators"]["training"]
    closing = aligned.events("run")[-1]
    assert (closing["alignment"]["steps"], closing["alignment"]["equal_steps"]) == (8, 8)
    assert aligned.events("error") == [] == aligned.events("alert")


def test_a_set_that_is_too_small_names_tokens_and_the_first_module_and_alerts(tmp_path: Path) -> None:
    hooks = "mismatch_hooks={enabled: true, align: [attention.*], ablate_every: 0, sinks: [jsonl]}"
    found = run("tiny_llama", tmp_path / "run", hooks, "steps=5")
    assert found.exit_code == 0, found.stderr
    _, *unequal = found.events("alignment")
    assert [event["step"] for event in unequal] == [0, 1, 2, 3, 4]
    first = unequal[0]
    assert 0 < first["unequal"] <= first["tokens"]
    assert {"sequence", "position", "rollout", "training"} == set(first["first"][0])
    assert first["first"][0]["rollout"] != first["first"][0]["training"]
    assert "first difference at layer 0" in first["where"] and "norm" in first["where"]
    assert unequal[-1]["where"].startswith("not traced")
    alerts = [alert for alert in found.events("alert") if alert["kind"] == "alignment"]
    assert [(alert["step"], alert["state"]) for alert in alerts] == [(0, "opened")]


SMALLEST = (
    "[attention.kernel, attention.rope_fusion, norm.rmsnorm@rollout, gemm.accumulation:padded_native@rollout, "
    "logprob.head_dtype:padded_native@rollout]"
)


def test_the_set_of_make_demo_aligned_is_exact_on_smollm2(tmp_path: Path) -> None:
    assert SMALLEST.replace(" ", "") in (ROOT / "Makefile").read_text().replace(" ", "").replace("\\\n\t", "")
    hooks = f"mismatch_hooks={{enabled: true, align: {SMALLEST}, ablate_every: 0, sinks: [jsonl]}}"
    found = run("smollm2", tmp_path / "run", hooks, "steps=2", "task.max_response_tokens=24", "wandb.mode=disabled")
    assert found.exit_code == 0, found.stderr
    steps = [event["metrics"] for event in found.events("step")]
    assert [(one["dlogp_max"], one["bitwise_fraction"], one["unequal_tokens"]) for one in steps] == [(0.0, 1.0, 0)] * 2
    assert len(found.events("alignment")) == 1
