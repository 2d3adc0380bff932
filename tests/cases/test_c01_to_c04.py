"""C01 to C04: one operator is faulty on one side or on both, everything else is known to be innocent.

What is faulty, and on which side, has to come out of ``ablate`` from the aligned origin; every other operator has to
come out as no cause.
"""

from collections.abc import Mapping

import pytest
import torch

from mismatch_hooks.schema.enums import Arm, Diagnosis, ExecutionPath, Origin, PolicyRole
from mismatch_hooks.schema.verdict import Verdict
from tests.ablating import ablate_tiny
from tests.planted_faults import (
    Fault,
    native_is_reference,
    operators,
    rollout_norm_epsilon,
    rollout_norm_rounds_early,
    rollout_rope,
    scaled_output,
    training_norm_rounds_early,
    training_rope,
)
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
BLAMED = {ROLLOUT: Diagnosis.CAUSED_BY_ROLLOUT_SIDE, TRAINING: Diagnosis.CAUSED_BY_TRAINING_SIDE}
Faults = Mapping[tuple[str, PolicyRole], Fault]


def judged(tiny: TinyEngines, faults: Faults) -> dict[str, Verdict]:
    with native_is_reference(tiny, faults):
        result = ablate_tiny(tiny, operators(tiny.shape), Origin.ALIGNED)
    assert all(gate.ok for verdict in result.verdicts for gate in verdict.gates)
    return {verdict.factor: verdict for verdict in result.verdicts}


def assert_accused(verdicts: Mapping[str, Verdict], factor: str, diagnosis: Diagnosis) -> None:
    innocent = dict.fromkeys(verdicts, Diagnosis.NOT_THIS_FACTOR)
    assert {name: verdict.diagnosis for name, verdict in verdicts.items()} == innocent | {factor: diagnosis}


def above_floor(verdict: Verdict) -> set[str]:
    return {arm.arm for arm in verdict.arms if arm.metrics["bitwise_fraction"] < 1.0}


def test_C01_rope_in_bf16_on_training_is_named_with_its_side(llama_engines: TinyEngines) -> None:
    verdicts = judged(llama_engines, {("attention.rope_fusion", TRAINING): training_rope(dtype=torch.bfloat16)})
    assert_accused(verdicts, "attention.rope_fusion", Diagnosis.CAUSED_BY_TRAINING_SIDE)
    assert above_floor(verdicts["attention.rope_fusion"]) == {Arm.ROLLOUT_REFERENCE_ONLY, Arm.BOTH_NATIVE}


def test_C02_a_norm_that_rounds_before_its_weight_on_rollout_is_named_with_its_side(llama_engines: TinyEngines) -> None:
    verdicts = judged(llama_engines, {("norm.rmsnorm", ROLLOUT): rollout_norm_rounds_early})
    assert_accused(verdicts, "norm.rmsnorm", Diagnosis.CAUSED_BY_ROLLOUT_SIDE)
    assert above_floor(verdicts["norm.rmsnorm"]) == {Arm.TRAINING_REFERENCE_ONLY, Arm.BOTH_NATIVE}


@pytest.mark.parametrize(
    ("side", "fault"), [(ROLLOUT, rollout_norm_rounds_early), (TRAINING, training_norm_rounds_early)]
)
def test_C02_control_with_all_norm_weights_1_it_rounds_nothing_away(
    side: PolicyRole, fault: Fault, llama_engines: TinyEngines
) -> None:
    norms = [
        (parameter, parameter.detach().clone())
        for model in llama_engines.models.values()
        for name, parameter in model.named_parameters()
        if "norm" in name
    ]
    try:
        with torch.no_grad():
            for parameter, _ in norms:
                parameter.fill_(1.0)
        verdicts = judged(llama_engines, {("norm.rmsnorm", side): fault})
    finally:
        with torch.no_grad():
            for parameter, before in norms:
                parameter.copy_(before)
    assert {verdict.diagnosis for verdict in verdicts.values()} == {Diagnosis.NOT_THIS_FACTOR}


def test_C03_rope_wrong_on_both_sides_for_different_reasons_accuses_both(llama_engines: TinyEngines) -> None:
    faults = {
        ("attention.rope_fusion", ROLLOUT): rollout_rope(frequency=1.01),
        ("attention.rope_fusion", TRAINING): training_rope(dtype=torch.bfloat16),
    }
    verdicts = judged(llama_engines, faults)
    assert_accused(verdicts, "attention.rope_fusion", Diagnosis.CAUSED_BY_BOTH_SIDES)
    rope = verdicts["attention.rope_fusion"]
    assert above_floor(rope) == set(Arm) - {Arm.BOTH_REFERENCE}
    departures = {arm.arm: arm.metrics["dlogp_mean"] for arm in rope.arms}
    rollout, training = departures[Arm.TRAINING_REFERENCE_ONLY], departures[Arm.ROLLOUT_REFERENCE_ONLY]
    assert rollout != training
    for side, size in (("rollout", rollout), ("training", training)):
        assert f"{side} native alone moves" in rope.reason and f"(mean |dlogp| {size:.4f})" in rope.reason


def test_C04_a_head_in_fp32_on_rollout_alone_accuses_training(fp32_head_engines: TinyEngines) -> None:
    verdict = _heads(fp32_head_engines)
    assert verdict.diagnosis is Diagnosis.CAUSED_BY_TRAINING_SIDE
    assert "fp32 on both sides or on neither" in verdict.recommendation


def test_C04_control_a_head_in_bf16_on_both_sides_is_no_cause(llama_engines: TinyEngines) -> None:
    verdict = _heads(llama_engines)
    assert verdict.diagnosis is Diagnosis.NOT_THIS_FACTOR
    moved = {arm.arm for arm in verdict.arms if arm.metrics["bitwise_fraction"] < 1.0}
    assert moved == {Arm.ROLLOUT_REFERENCE_ONLY, Arm.TRAINING_REFERENCE_ONLY}  # both differ from the fp32 reference


def _heads(tiny: TinyEngines) -> Verdict:
    with native_is_reference(tiny, leave=["logprob.head_dtype"]):
        verdict, *_ = ablate_tiny(tiny, ["logprob.head_dtype"], Origin.ALIGNED).verdicts
    assert verdict.path is ExecutionPath.ROLLOUT_FULL_PREFILL
    return verdict


@pytest.mark.parametrize(
    ("factor", "role", "fault"),
    [
        pytest.param(
            "attention.rope_fusion", ROLLOUT, rollout_rope(dtype=torch.bfloat16), id="C01 the same rope on rollout"
        ),
        pytest.param("norm.rmsnorm", TRAINING, training_norm_rounds_early, id="C02 the same norm on training"),
        pytest.param("norm.qk_norm", ROLLOUT, rollout_norm_rounds_early, id="C02 the norm of queries and keys"),
        pytest.param("norm.rmsnorm", ROLLOUT, rollout_norm_epsilon(1e-3), id="another epsilon"),
        *(
            pytest.param(factor, role, scaled_output, id=f"{factor} scaled on {role.value}")
            for factor in ("activation.swiglu", "attention.kernel", "embedding.lookup", "gemm.accumulation")
            for role in PolicyRole
        ),
        pytest.param("logprob.head_dtype", TRAINING, scaled_output, id="logprob.head_dtype scaled on training"),
    ],
)
def test_other_faults_of_the_kind_are_named_with_their_side(
    factor: str, role: PolicyRole, fault: Fault, qwen3_engines: TinyEngines
) -> None:
    assert_accused(judged(qwen3_engines, {(factor, role): fault}), factor, BLAMED[role])
