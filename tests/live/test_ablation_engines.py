"""Every live factor on both real engines: bound, counted, read back, judged, restored."""

from collections.abc import Mapping

import pytest

from mismatch_hooks.live.ablation import AblationResult
from mismatch_hooks.live.planning import make_plan
from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.schema.enums import Diagnosis, Expansion, Origin, PlanOutcome, PolicyRole
from tests.ablating import ablate_tiny
from tests.tiny_engines import TinyEngines

pytestmark = pytest.mark.engine
TRAINING = PolicyRole.TRAINING


@pytest.fixture(scope="module")
def everything(qwen3_engines: TinyEngines) -> AblationResult:
    return ablate_tiny(qwen3_engines, "all")


def test_every_live_factor_is_judged_with_all_gates_open(everything: AblationResult) -> None:
    live = {factor.id for factor in load_registry().factors.values() if factor.passes and factor.needs_adapter}
    judged = {verdict.factor: verdict for verdict in everything.verdicts}
    assert live - set(judged) == {"gemm.forward_reduce"}  # nothing is added up over one rank
    closed = {
        verdict.factor: [gate.reason for gate in verdict.gates if not gate.ok]
        for verdict in everything.verdicts
        if not all(gate.ok for gate in verdict.gates)
    }
    assert closed == {}


def test_a_sweep_has_its_baseline_and_every_value_as_an_arm(everything: AblationResult) -> None:
    factors = load_registry().factors
    for verdict in everything.verdicts:
        if factors[verdict.factor].expansion is Expansion.VALUE_SWEEP:
            assert [arm.arm for arm in verdict.arms] == list(factors[verdict.factor].arms)
            assert verdict.diagnosis in (Diagnosis.NOT_THIS_FACTOR, Diagnosis.INSUFFICIENT_EVIDENCE)


def test_writing_log_probs_back_in_the_models_dtype_moves_them(everything: AblationResult) -> None:
    (verdict,) = (one for one in everything.verdicts if one.factor == "logprob.precision_downcast")
    moved = {effect.arm: effect.bits_changed for effect in verdict.effects}
    assert moved["training=fp32"] == 0  # the trainer's own function rounds nowhere
    assert moved["training=logprob"] > 0.8 * verdict.tokens  # bf16 near -5 has a spacing of 0.03
    assert moved["training=logsumexp"] > 0.8 * verdict.tokens
    means = {arm.arm: arm.metrics["dlogp_signed_mean"] for arm in verdict.arms}
    assert means["training=logsumexp"] != means["training=logprob"]  # another place, and other values


def test_equal_weights_are_no_cause(everything: AblationResult) -> None:
    (verdict,) = (one for one in everything.verdicts if one.factor == "weights.sync")
    assert (verdict.diagnosis, verdict.passes) == (Diagnosis.NOT_THIS_FACTOR, 0)


def test_what_only_a_new_engine_can_change_is_left_out_with_its_cost(qwen3_engines: TinyEngines) -> None:
    made = make_plan("all", load_registry(), qwen3_engines.engines, qwen3_engines.shape, Origin.NATIVE)
    offline = {left.factor.id: left for left in made.left_out}
    assert offline["rollout.compile"].outcome is PlanOutcome.NOT_SWITCHABLE_IN_PROCESS
    assert "an engine rebuild" in offline["rollout.compile"].reason
    assert "new process groups" in offline["training.tensor_parallel"].reason


def test_the_terms_of_the_difference_are_reported_apart(everything: AblationResult) -> None:
    terms: Mapping[str, Mapping[str, float]] = everything.paths
    assert terms["training_rescore"]["bitwise_fraction"] == 1.0
    assert terms["cross_framework"]["dlogp_mean"] > 0.0
    assert {"decode_against_prefill", "live_against_decode"} <= set(terms)


@pytest.mark.parametrize("engines", ["llama_engines", "qwen3_engines"])
def test_from_aligned_both_engines_are_equal_to_the_bit_and_each_operator_is_told_apart(
    engines: str, request: pytest.FixtureRequest
) -> None:
    """The floor is bitwise over mixed lengths, prefill and decode; then each operator alone is given back to native.

    What each native operator does was measured on its own in ``operator_checks``: the trainer's norm is the reference,
    the rollout's is not; both activations round alike; rope differs from the reference on either side. So does
    attention on most processors; on one with AVX-512 bf16 instructions
    vLLM's kernel had the reference's bits on these tokens.
    """
    tiny: TinyEngines = request.getfixturevalue(engines)
    expected = {
        "activation.swiglu": Diagnosis.NOT_THIS_FACTOR,
        "attention.rope_fusion": Diagnosis.CAUSED_BY_BOTH_SIDES,
        "embedding.lookup": Diagnosis.NOT_THIS_FACTOR,
        "norm.qk_norm": Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
        "norm.rmsnorm": Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
    }
    result = ablate_tiny(tiny, ["attention.kernel", *expected], Origin.ALIGNED)
    floor = {name: figures["bitwise_fraction"] for name, figures in result.paths.items()}
    assert floor == dict.fromkeys(
        ("cross_framework", "decode_against_prefill", "live_against_prefill", "training_rescore"), 1.0
    )
    found = {verdict.factor: verdict.diagnosis for verdict in result.verdicts}
    attention = found.pop("attention.kernel")
    assert attention in (Diagnosis.CAUSED_BY_BOTH_SIDES, Diagnosis.CAUSED_BY_TRAINING_SIDE)
    assert found == {factor: expected[factor] for factor in found}
    assert len(found) == (5 if tiny.shape.qk_norm else 4)


def test_from_aligned_one_factor_alone_stands_on_the_same_exact_floor(llama_engines: TinyEngines) -> None:
    result = ablate_tiny(llama_engines, ["attention.rope_fusion"], Origin.ALIGNED)
    assert result.paths["cross_framework"]["bitwise_fraction"] == 1.0
    (verdict,) = result.verdicts
    assert verdict.diagnosis is Diagnosis.CAUSED_BY_BOTH_SIDES
