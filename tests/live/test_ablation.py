"""One ablation over fake engines: which passes run, what is not reached, and what each origin concludes."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from mismatch_hooks.live.ablation import AblationResult, NotRestoredError, ablate
from mismatch_hooks.live.execution import execution_of
from mismatch_hooks.live.passes import CapturedBatch
from mismatch_hooks.live.registry import Registry, load_registry
from mismatch_hooks.pipeline.bind import BindingError
from mismatch_hooks.pipeline.plan import plan
from mismatch_hooks.schema.enums import (
    Arm,
    Choice,
    DeterminismLevel,
    Diagnosis,
    ExecutionPath,
    NoiseFloor,
    Origin,
    PlanOutcome,
    PolicyRole,
    Value,
)
from mismatch_hooks.schema.plan import Candidate
from mismatch_hooks.schema.readback import Unobservable
from mismatch_hooks.schema.score import Binding, Score, ScoringSequence, SwitchState, WeightsDigest
from tests.fake_engines import FACTOR, FakeEngine
from tests.live.test_hooks import SHAPE

ROLLOUT, TRAINING = PolicyRole.ROLLOUT, PolicyRole.TRAINING
SEQUENCES = tuple(
    ScoringSequence(
        prompt_token_ids=(1,),
        response_token_ids=tuple((row * 40 + i) % 97 for i in range(40)),
        response_mask=(True,) * 40,
    )
    for row in range(12)
)


def _candidate(name: str, registry: Registry | None = None) -> Candidate:
    factor = (registry or load_registry()).factors[name]
    able = [one for one in factor.references if not one.prerequisites.required_packages]
    reference = able[0] if able else None
    return Candidate(factor=factor, outcome=PlanOutcome.PLANNED, reference=reference, reason="")


def _weights(rollout: str, training: str) -> dict[PolicyRole, WeightsDigest]:
    return {
        role: WeightsDigest(role=role, version="1", tensors={"a": "1", "b": digest})
        for role, digest in ((ROLLOUT, rollout), (TRAINING, training))
    }


def _sides(**errors: Any) -> tuple[FakeEngine, FakeEngine]:
    return FakeEngine(side=ROLLOUT, **errors), FakeEngine(side=TRAINING, **errors)


def _ablate(
    sides: tuple[FakeEngine, FakeEngine], *factors: str, origin: Origin = Origin.NATIVE, **changes: Any
) -> AblationResult:
    rollout, training = sides
    registry: Registry = changes.pop("registry", load_registry())
    batch = CapturedBatch(
        sequences=SEQUENCES,
        rollout_logprobs=[rollout.logprobs(one, Choice.NATIVE) for one in SEQUENCES],
        training_logprobs=[training.logprobs(one, Choice.NATIVE) for one in SEQUENCES],
        epsilon_low=0.2,
        epsilon_high=0.2,
        weights=changes.pop(
            "weights", {side: WeightsDigest(role=side, version="1", tensors={"a": "1"}) for side in PolicyRole}
        ),
    )
    engines = {ROLLOUT: rollout, TRAINING: training}
    execution = execution_of(
        SEQUENCES,
        {role: engine.read_back() for role, engine in engines.items()},
        batch.weights,
        shape=SHAPE,
        origin=origin,
    )
    return ablate(
        plan([_candidate(name, registry) for name in factors], origin=origin),
        batch,
        engines=engines,
        registry=registry,
        shape=SHAPE,
        noise_floor=NoiseFloor.PRODUCTION,
        pitfalls=lambda rescored: (),
        execution=execution,
        timeout_s=10.0,
        **changes,
    )


@pytest.mark.parametrize(
    ("rollout_error", "training_error", "expected"),
    [
        pytest.param(0.05, 0.0, Diagnosis.CAUSED_BY_ROLLOUT_SIDE, id="rollout departs"),
        pytest.param(0.0, 0.05, Diagnosis.CAUSED_BY_TRAINING_SIDE, id="training departs"),
        pytest.param(0.05, 0.05, Diagnosis.CAUSED_BY_BOTH_SIDES, id="both depart"),
        pytest.param(0.0, 0.0, Diagnosis.NOT_THIS_FACTOR, id="neither departs"),
    ],
)
def test_from_aligned_the_factor_is_given_back_to_native(
    rollout_error: float, training_error: float, expected: Diagnosis
) -> None:
    sides = (
        FakeEngine(side=ROLLOUT, native_error=rollout_error),
        FakeEngine(side=TRAINING, native_error=training_error),
    )
    result = _ablate(sides, FACTOR, origin=Origin.ALIGNED)
    (verdict,) = result.verdicts
    assert verdict.diagnosis is expected
    assert all(gate.ok for gate in verdict.gates)
    # The live values are native, so the bridge to them is a native pass a side; it closes here.
    assert sorted(result.paths) == [
        "cross_framework",
        "decode_against_prefill",
        "live_against_prefill",
        "training_rescore",
    ]
    assert all(result.paths[term]["bitwise_fraction"] == 1.0 for term in ("live_against_prefill", "training_rescore"))
    # The aligned pass and the native one of each role, the aligned one again as the proof; two bridges; the decode.
    assert (result.passes, verdict.passes) == (9, 4)


def test_the_two_terms_of_the_difference_are_reported_apart_and_add_up() -> None:
    result = _ablate(_sides(native_error=0.05), FACTOR)
    assert sorted(result.paths) == [
        "cross_framework",
        "decode_against_prefill",
        "live_against_decode",
        "training_rescore",
    ]
    # A fake engine decodes as it prefills, and scores as it sampled.
    assert result.paths["cross_framework"]["dlogp_mean"] > 0.0
    assert all(
        result.paths[term]["bitwise_fraction"] == 1.0
        for term in ("decode_against_prefill", "live_against_decode", "training_rescore")
    )


def test_from_aligned_something_that_no_factor_covers_breaks_the_reference() -> None:
    sides = _sides(native_error=0.05, other_error=0.01)
    (verdict,) = _ablate(sides, FACTOR, origin=Origin.ALIGNED).verdicts
    assert verdict.diagnosis is Diagnosis.REFERENCE_ITSELF_IS_BROKEN


@pytest.mark.parametrize("side", [ROLLOUT, TRAINING])
def test_weights_that_are_written_while_arms_are_scored_end_ablation(side: PolicyRole) -> None:
    sides = tuple(FakeEngine(side=role, mutates=role is side) for role in (ROLLOUT, TRAINING))
    with pytest.raises(NotRestoredError, match=f"the {side.value} engine's weights were written [34] times while"):
        _ablate(sides, FACTOR)  # type: ignore[arg-type]


def test_contents_are_judged_without_a_pass_and_name_the_tensors() -> None:
    (verdict,) = _ablate(_sides(), "weights.sync", weights=_weights("1", "2")).verdicts
    assert (verdict.diagnosis, verdict.passes) == (Diagnosis.CAUSED_BY_ROLLOUT_SIDE, 0)
    assert "1 of 2 tensors were not updated" in verdict.reason and "(b)" in verdict.reason


def test_a_tensor_that_could_not_be_read_is_neither_equal_nor_different() -> None:
    (verdict,) = _ablate(_sides(), "weights.sync", weights=_weights("unobservable: packed", "2")).verdicts
    assert verdict.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE
    assert verdict.reason == "Not every tensor was read: b on rollout (packed)."


def test_a_factor_for_which_no_time_is_left_is_named_and_the_first_one_always_runs() -> None:
    result = _ablate(_sides(), FACTOR, "rollout.batch_size", "weights.sync", budget_s=0.0)
    # Comparing contents takes no pass, so it is never short of time, and it comes first.
    assert [verdict.factor for verdict in result.verdicts] == ["weights.sync", FACTOR]
    assert result.not_reached == ("rollout.batch_size",)
    assert result.whole_seconds > result.seconds


def test_the_next_plan_starts_with_what_was_not_reached() -> None:
    made = plan([_candidate(name) for name in (FACTOR, "rollout.batch_size", "weights.sync")], origin=Origin.NATIVE)
    again = made.starting_with(("weights.sync",))
    assert [case.factor.id for case in again.cases] == ["weights.sync", FACTOR, "rollout.batch_size"]


def test_a_binding_that_fails_late_by_prefill_costs_its_decode_nothing() -> None:
    class Late(FakeEngine):
        """Sampled otherwise than it scores, so that decode is examined; refuses its first native pass from aligned."""

        calls = 0

        def logprobs(self, sequence: ScoringSequence, choice: Value) -> list[float]:
            self.calls += 1
            live = 1e-3 if self.side is ROLLOUT and self.calls <= len(SEQUENCES) else 0.0
            return [value + live for value in super().logprobs(sequence, choice)]

        def score(self, *args: Any, **options: Any) -> Score:
            native = self.bound is not None and self.bound.choices.get(FACTOR) is Choice.NATIVE
            if native and self.side is ROLLOUT and self.passes == 3 and "late" not in self.fail:
                self.fail["late"] = BindingError("the graph was captured.")
                raise self.fail["late"]
            return super().score(*args, **options)

    result = _ablate((Late(side=ROLLOUT), Late(side=TRAINING)), FACTOR, origin=Origin.ALIGNED)
    found = [(verdict.path, verdict.diagnosis) for verdict in result.verdicts]
    assert found == [
        (ExecutionPath.ROLLOUT_FULL_PREFILL, Diagnosis.VARIANT_DID_NOT_APPLY),
        (ExecutionPath.ROLLOUT_DECODE, Diagnosis.NOT_THIS_FACTOR),
    ]


def test_a_factor_that_does_not_fit_a_live_model_leaves_the_others_their_verdicts() -> None:
    class Refusing(FakeEngine):
        def switch_states(self, binding: Binding) -> tuple[SwitchState, ...]:
            if "norm.rmsnorm" in binding.choices:
                raise BindingError("this norm is of another kind.")
            return super().switch_states(binding)

    sides = (Refusing(side=ROLLOUT, native_error=0.05), FakeEngine(side=TRAINING))
    refused, judged = sorted(_ablate(sides, FACTOR, "norm.rmsnorm").verdicts, key=lambda one: one.factor, reverse=True)
    assert (refused.diagnosis, refused.reason) == (Diagnosis.VARIANT_DID_NOT_APPLY, "this norm is of another kind.")
    assert judged.diagnosis is Diagnosis.CAUSED_BY_ROLLOUT_SIDE


@dataclass(slots=True)
class Coupled(FakeEngine):
    """Rollout's native rope is off; so is training's reference, until training's norm is on its reference too."""

    def logprobs(self, sequence: ScoringSequence, choice: Value) -> list[float]:
        exact = super(Coupled, self).logprobs(sequence, Choice.REFERENCE)
        norm = Choice.NATIVE if self.bound is None else self.bound.choices.get("norm.rmsnorm", Choice.NATIVE)
        off = choice is Choice.NATIVE if self.side is ROLLOUT else choice is not Choice.NATIVE and norm is Choice.NATIVE
        stream = np.random.default_rng([*sequence.response_token_ids, len(self.side.value)])
        moved = np.array(exact) + off * 0.1 * stream.standard_normal(len(exact))
        values: list[float] = moved.astype(np.float32).tolist()
        return values


def test_a_coupled_factor_is_scored_with_each_other_one_and_the_partner_is_named() -> None:
    result = _ablate((Coupled(side=ROLLOUT), Coupled(side=TRAINING)), FACTOR, "norm.rmsnorm")
    verdict = next(one for one in result.verdicts if one.factor == FACTOR)
    assert verdict.diagnosis is Diagnosis.COUPLED_WITH_OTHER_FACTORS
    assert "With the reference of another factor beside it the mismatch does fall: norm.rmsnorm: mean" in verdict.reason
    assert [arm.arm for arm in verdict.arms] == [*Arm, "both_reference+norm.rmsnorm"]
    assert verdict.arms[-1].metrics["dlogp_max"] == 0.0
    assert verdict.passes == 6
    alone = _ablate((Coupled(side=ROLLOUT), Coupled(side=TRAINING)), FACTOR)
    assert [arm.arm for one in alone.verdicts for arm in one.arms] == [*Arm]


def test_without_time_a_pair_is_named_and_not_scored() -> None:
    sides = (Coupled(side=ROLLOUT), Coupled(side=TRAINING))
    result = _ablate(sides, FACTOR, "norm.rmsnorm", budget_s=0.0)
    verdict = next(one for one in result.verdicts if one.factor == FACTOR)
    assert verdict.diagnosis is Diagnosis.COUPLED_WITH_OTHER_FACTORS
    assert verdict.reason.endswith("No time was left to score it with norm.rmsnorm.")
    assert [arm.arm for arm in verdict.arms] == [*Arm]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({}, "No effective-config readback from training: the engine reports no setting", id="readback"),
        pytest.param({"model.dtype": "bfloat16"}, "No library versions from training: no installed", id="libraries"),
        pytest.param(
            {"library.x": "1", "model.rope.inverse_frequency_last": Unobservable(reason="two tables")},
            "No position cache from training: two tables.",
            id="the factor's own",
        ),
    ],
)
def test_a_verdict_is_blocked_where_evidence_that_it_needs_was_not_seen(settings: dict[str, Any], words: str) -> None:
    sides = (FakeEngine(side=ROLLOUT), FakeEngine(side=TRAINING, settings=settings))
    (verdict,) = _ablate(sides, FACTOR, origin=Origin.ALIGNED).verdicts
    assert verdict.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE
    assert words in verdict.reason
    (clear,) = _ablate(_sides(), FACTOR, origin=Origin.ALIGNED).verdicts
    assert clear.diagnosis is Diagnosis.NOT_THIS_FACTOR


def test_what_the_two_sides_contracts_do_not_share_is_on_the_verdict() -> None:
    other = {**FakeEngine(side=TRAINING).settings, "model.rope.theta": 5e5, "model.rope.fused": True}
    sides = (FakeEngine(side=ROLLOUT), FakeEngine(side=TRAINING, settings=other))
    (verdict,) = _ablate(sides, FACTOR).verdicts
    (issue,) = verdict.issues  # whether it is fused is what the factor is about, and is recorded
    assert (issue.path, issue.values) == ("extra.theta", {ROLLOUT: 1e4, TRAINING: 5e5})
    (same,) = _ablate(_sides(), FACTOR).verdicts
    assert same.issues == ()


def _repeating() -> Registry:
    """The registry, with a rope reference that claims the same bits in every topology."""
    registry = load_registry()
    factor = registry.factors[FACTOR]
    claim = replace(factor.references[-1], determinism=DeterminismLevel.STABLE_ACROSS_TOPOLOGY)
    claiming = replace(factor, references=(claim,), repeat_under={"ALGO": ("ring", "tree"), "PROTO": ("a",)})
    return replace(registry, factors={**registry.factors, FACTOR: claiming})


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        pytest.param(0.0, Diagnosis.CAUSED_BY_BOTH_SIDES, id="it survives"),
        pytest.param(1e-3, Diagnosis.REFERENCE_ITSELF_IS_BROKEN, id="it does not"),
    ],
)
def test_a_reference_that_claims_every_topology_is_repeated_in_each(error: float, expected: Diagnosis) -> None:
    sides = FakeEngine(side=ROLLOUT, native_error=0.1), FakeEngine(side=TRAINING, native_error=0.1)
    sides[0].environment_error = error
    result = _ablate(sides, FACTOR, origin=Origin.ALIGNED, registry=_repeating())
    (verdict,) = result.verdicts
    assert verdict.diagnosis is expected, verdict.reason
    # Two combinations on each role, beside the four passes of the arms.
    assert (verdict.passes, result.passes) == (8, 13)
    if error:
        assert "1 of 1 shards on rollout under ALGO=ring, PROTO=a; 1 of 1 shards on rollout under ALGO=tree" in (
            verdict.reason
        )
    else:
        # What was compared in a repeat is forgotten: the arms are those of the run's own environment.
        (plain,) = _ablate(
            (FakeEngine(side=ROLLOUT, native_error=0.1), sides[1]), FACTOR, origin=Origin.ALIGNED
        ).verdicts
        assert verdict.arms == plain.arms
