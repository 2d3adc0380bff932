"""What the other records promise: checked and frozen where they are built."""

import dataclasses
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mismatch_hooks.schema.capture import RolloutSequence, SamplingSettings
from mismatch_hooks.schema.enums import (
    Arm,
    Choice,
    Diagnosis,
    ExecutionPath,
    GateName,
    NoiseFloor,
    Origin,
    PolicyRole,
    RebindCost,
    ReferenceAuthority,
    Source,
)
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError
from mismatch_hooks.schema.plan import Plan, Surroundings
from mismatch_hooks.schema.readback import Readback, Reading, Unobservable
from mismatch_hooks.schema.score import Binding, ScoringSequence, WeightsDigest
from mismatch_hooks.schema.shape import ModelShape
from mismatch_hooks.schema.verdict import ArmReading, Gate, Verdict

SHAPE: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "layers": 2,
    "hidden_size": 128,
    "ffn_size": 256,
    "query_heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "norm_epsilon": 1e-5,
    "rope_theta": 1e4,
    "tied_embeddings": False,
    "qk_norm": False,
}


def _verdict(diagnosis: Diagnosis, gates: tuple[Gate, ...]) -> Verdict:
    return Verdict(
        factor="attention.rope_fusion",
        origin=Origin.NATIVE,
        noise_floor=NoiseFloor.PRODUCTION,
        path=ExecutionPath.ROLLOUT_FULL_PREFILL,
        diagnosis=diagnosis,
        reason="",
        gates=gates,
        tokens=1,
        passes=4,
        seconds=1.0,
        fingerprint="",
    )


def _gates(*states: bool) -> tuple[Gate, ...]:
    return tuple(Gate(name=name, ok=ok, reason="") for name, ok in zip(GateName, states, strict=True))


@pytest.mark.parametrize(
    ("record", "field"),
    [
        pytest.param(SamplingSettings(sources={"top_p": "requested"}), "sources", id="SamplingSettings"),
        pytest.param(Binding(role=PolicyRole.ROLLOUT, choices={"a.b": Choice.NATIVE}), "choices", id="Binding.choices"),
        pytest.param(Binding(role=PolicyRole.ROLLOUT, parameters={"a.b": {"x": [1]}}), "parameters", id="Binding"),
        pytest.param(WeightsDigest(role=PolicyRole.ROLLOUT, version="", tensors={"w": "1"}), "tensors", id="digest"),
        pytest.param(WeightsDigest(role=PolicyRole.ROLLOUT, version="", tensors={}), "derived", id="derived digest"),
        pytest.param(ArmReading(arm=Arm.BOTH_NATIVE, metrics={"tokens": 1.0}), "metrics", id="ArmReading"),
        pytest.param(Readback(role=PolicyRole.ROLLOUT, settings={}), "settings", id="Readback"),
        pytest.param(ModelShape(**SHAPE, rope_scaling={"factor": 8.0}), "rope_scaling", id="ModelShape"),
        pytest.param(Surroundings(packages={}, cuda_devices=0, model_traits=()), "packages", id="Surroundings"),
        pytest.param(
            Surroundings(
                packages={},
                cuda_devices=0,
                model_traits=(),
                capabilities={PolicyRole.ROLLOUT: {"p": RebindCost.PER_REQUEST}},
            ),
            "capabilities",
            id="Surroundings.capabilities",
        ),
    ],
)
def test_every_mapping_in_a_record_is_frozen_and_pickles(record: Any, field: str) -> None:
    assert type(getattr(record, field)) is FrozenMapping
    assert pickle.loads(pickle.dumps(record)) == record
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, field, {})


def test_capabilities_cannot_change_after_discovery_has_seen_them() -> None:
    costs = {"p": RebindCost.PER_REQUEST}
    seen = Surroundings(packages={}, cuda_devices=0, model_traits=(), capabilities={PolicyRole.ROLLOUT: costs})
    costs["p"] = RebindCost.PROCESS_RESTART
    assert seen.capabilities[PolicyRole.ROLLOUT]["p"] is RebindCost.PER_REQUEST


def test_a_sequence_without_a_mask_counts_every_token() -> None:
    given: Any = [2, 3]
    sequence = RolloutSequence(prompt_token_ids=(1,), response_token_ids=given, rollout_logprobs=(-1.0, None))
    given.append(4)
    assert (sequence.response_token_ids, sequence.mask) == ((2, 3), (True, True))


@pytest.mark.parametrize(
    ("prompt", "mask", "sentence"),
    [
        pytest.param((), (True, True), "a sequence has an empty prompt", id="empty prompt"),
        pytest.param((1,), (True,), "a sequence has 2 response tokens and 1 mask entries", id="short mask"),
    ],
)
def test_a_sequence_that_cannot_be_scored_is_refused(prompt: Any, mask: Any, sentence: str) -> None:
    with pytest.raises(SchemaError, match=f"^{sentence}"):
        ScoringSequence(prompt_token_ids=prompt, response_token_ids=(2, 3), response_mask=mask)


def test_a_binding_names_the_factors_that_are_not_native_in_order() -> None:
    binding = Binding(
        role=PolicyRole.ROLLOUT, choices={"b.b": Choice.REFERENCE, "c.c": Choice.NATIVE, "a.a": Choice.REFERENCE}
    )
    assert binding.bound == ("a.a", "b.b")


def test_a_setting_that_was_not_read_equals_nothing() -> None:
    readback = Readback(
        role=PolicyRole.TRAINING,
        settings={
            "read": Reading(effective=1e-5, source=Source.LIVE_MODULE),
            "hidden": Unobservable(reason="sharded"),
        },
    )
    assert readback.effective("read") == 1e-5
    assert readback.effective("hidden") == Unobservable(reason="sharded")
    assert readback.effective("gone") == Unobservable(reason="the training engine reports no setting gone")
    with pytest.raises(SchemaError, match=r"^Unobservable\.reason is empty; say why"):
        Unobservable(reason="")


@pytest.mark.parametrize(
    ("requested", "effective", "differs"),
    [
        pytest.param({}, 10000, False, id="nobody asked"),
        pytest.param({"requested": 500000}, 10000, True, id="asked for and not in effect"),
        pytest.param({"requested": 10000}, 10000, False, id="asked for and in effect"),
        pytest.param({"requested": None}, 10000, True, id="asked for None"),
    ],
)
def test_requested_and_effective_are_two_facts(requested: dict[str, Any], effective: int, differs: bool) -> None:
    reading = Reading(effective=effective, source=Source.LIVE_MODULE, **requested)
    assert reading.differs_from_request is differs


def test_query_heads_must_divide_by_kv_heads() -> None:
    with pytest.raises(SchemaError, match=r"^LlamaForCausalLM: 4 query heads do not divide by 3 KV heads\.$"):
        ModelShape(**{**SHAPE, "kv_heads": 3})


def test_a_shape_names_its_traits() -> None:
    assert ModelShape(**SHAPE).traits == ("rope", "gated_mlp", "rmsnorm")
    assert ModelShape(**{**SHAPE, "qk_norm": True}).traits == ("rope", "gated_mlp", "rmsnorm", "qk_norm")


def test_an_empty_plan_costs_no_pass() -> None:
    nothing = Plan(origin=Origin.NATIVE, cases=(), left_out=())
    assert (nothing.passes, nothing.passes_with_proofs) == (0, 0)


def test_ordered_enums_are_declared_in_order() -> None:
    assert sorted(RebindCost, reverse=True)[0] is RebindCost.PROCESS_RESTART
    assert RebindCost.PER_REQUEST < RebindCost.ENGINE_REBUILD < RebindCost.PROCESS_GROUP_REBUILD
    assert NoiseFloor.SINGLE_LAYER_ANCHOR < NoiseFloor.FULL_MODEL_SINGLE_DEVICE < NoiseFloor.SHARDED_SINGLE_NODE
    assert ReferenceAuthority.FP64_ORACLE < ReferenceAuthority.SHARED_BACKEND < ReferenceAuthority.SELF_WRITTEN


@pytest.mark.parametrize(
    ("arm", "rollout", "training"),
    [
        pytest.param(Arm.BOTH_NATIVE, Choice.NATIVE, Choice.NATIVE, id="both native"),
        pytest.param(Arm.ROLLOUT_REFERENCE_ONLY, Choice.REFERENCE, Choice.NATIVE, id="rollout on the reference"),
        pytest.param(Arm.TRAINING_REFERENCE_ONLY, Choice.NATIVE, Choice.REFERENCE, id="training on the reference"),
        pytest.param(Arm.BOTH_REFERENCE, Choice.REFERENCE, Choice.REFERENCE, id="both on the reference"),
    ],
)
def test_an_arm_binds_each_role_as_its_name_says(arm: Arm, rollout: Choice, training: Choice) -> None:
    assert arm.choices == {PolicyRole.ROLLOUT: rollout, PolicyRole.TRAINING: training}


def test_three_diagnoses_say_that_nothing_was_judged() -> None:
    assert [diagnosis for diagnosis in Diagnosis if not diagnosis.judged] == [
        Diagnosis.VARIANT_DID_NOT_APPLY,
        Diagnosis.INSUFFICIENT_EVIDENCE,
        Diagnosis.REFERENCE_ITSELF_IS_BROKEN,
    ]


@given(states=st.tuples(*[st.booleans()] * 4), diagnosis=st.sampled_from(Diagnosis))
def test_no_judged_diagnosis_is_published_while_a_gate_failed(
    states: tuple[bool, bool, bool, bool], diagnosis: Diagnosis
) -> None:
    gates = _gates(*states)
    if all(states) or diagnosis in list(Diagnosis)[:3]:
        assert _verdict(diagnosis, gates).diagnosis is diagnosis
        return
    failed = ", ".join(name.value for name, ok in zip(GateName, states, strict=True) if not ok)
    with pytest.raises(SchemaError) as refused:
        _verdict(diagnosis, gates)
    assert str(refused.value) == (
        f"attention.rope_fusion: {diagnosis.value} cannot be published while {failed} failed."
    )


@pytest.mark.parametrize(
    "gates",
    [
        pytest.param((), id="none"),
        pytest.param(_gates(True, True, True, True)[:3], id="three"),
        pytest.param(_gates(True, True, True, True)[::-1], id="another order"),
        pytest.param((*_gates(True, True, True, True)[:3], _gates(True, True, True, True)[0]), id="one twice"),
    ],
)
def test_a_verdict_carries_all_four_gates_in_order(gates: tuple[Gate, ...]) -> None:
    with pytest.raises(SchemaError, match=r"^attention\.rope_fusion: a verdict carries all 4 gates in order; got"):
        _verdict(Diagnosis.INSUFFICIENT_EVIDENCE, gates)
