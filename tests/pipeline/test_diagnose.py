"""What a factor's arms mean, on the heavy-tailed differences that real engines show."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from mismatch_hooks.pipeline.diagnose import (
    Finding,
    blocked,
    diagnose_content,
    diagnose_from_aligned,
    diagnose_from_native,
    diagnose_sweep,
)
from mismatch_hooks.pipeline.score import ArmTokens
from mismatch_hooks.pipeline.statistics import LEVEL
from mismatch_hooks.schema.enums import Arm, Diagnosis, GateName, PolicyRole
from mismatch_hooks.schema.verdict import Gate
from tests.pipeline.samples import EPSILONS, ROLLOUT, TRAINING, arm_tokens, arms, digest


def _noise(sequences: int, tokens: int, *, seed: int = 0, scale: float = 0.03) -> np.ndarray:
    """Differences with a heavy tail: Student's t with three degrees of freedom."""
    return scale * np.random.default_rng(seed).standard_t(3, (sequences, tokens))


def _judge(native: np.ndarray, rollout: np.ndarray, training: np.ndarray, both: np.ndarray) -> Finding:
    return diagnose_from_native(arms(native, rollout, training, both), **EPSILONS)


def _redrawn(native: np.ndarray, seed: int) -> np.ndarray:
    """The same tokens with their rounding drawn anew: as large, another value."""
    return _noise(*native.shape, seed=seed)


# 24 sequences of 64 tokens: what a step samples.
NATIVE = _noise(24, 64)
HALF = 0.5 * NATIVE


@pytest.mark.parametrize(
    ("rollout", "training", "both", "diagnosis", "start"),
    [
        pytest.param(
            HALF,
            _redrawn(NATIVE, 1),
            HALF,
            Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
            "The reference on rollout alone lowers the mismatch: mean |dlogp| 0.0",
            id="the reference helps on rollout",
        ),
        pytest.param(
            _redrawn(NATIVE, 1),
            HALF,
            HALF,
            Diagnosis.CAUSED_BY_TRAINING_SIDE,
            "The reference on training alone lowers the mismatch: mean |dlogp| 0.0",
            id="the reference helps on training",
        ),
        pytest.param(
            _redrawn(NATIVE, 1),
            _redrawn(NATIVE, 2),
            HALF,
            Diagnosis.CAUSED_BY_BOTH_SIDES,
            "Only both references together lower the mismatch, so each side departs from the reference: mean |dlogp|",
            id="only both together help",
        ),
        pytest.param(
            HALF,
            _redrawn(NATIVE, 1),
            _redrawn(NATIVE, 2),
            Diagnosis.COUPLED_WITH_OTHER_FACTORS,
            "One side's reference lowers the mismatch and both together do not",
            id="rollout helps and both do not",
        ),
        pytest.param(
            _redrawn(NATIVE, 1),
            HALF,
            _redrawn(NATIVE, 2),
            Diagnosis.COUPLED_WITH_OTHER_FACTORS,
            "One side's reference lowers the mismatch and both together do not",
            id="training helps and both do not",
        ),
        pytest.param(
            HALF,
            0.6 * NATIVE,
            HALF,
            Diagnosis.INSUFFICIENT_EVIDENCE,
            "Either reference alone lowers the mismatch, and the native origin cannot tell the side. On rollout:",
            id="either alone helps",
        ),
        pytest.param(
            _redrawn(NATIVE, 1),
            _redrawn(NATIVE, 2),
            _redrawn(NATIVE, 3),
            Diagnosis.INSUFFICIENT_EVIDENCE,
            "Nothing is resolved: mean |dlogp| is 0.0",
            id="every swap only draws the rounding anew",
        ),
        pytest.param(
            1.5 * NATIVE,
            1.5 * NATIVE,
            2.0 * NATIVE,
            Diagnosis.INSUFFICIENT_EVIDENCE,
            "Nothing is resolved: mean |dlogp| is 0.0",
            id="the references make it worse",
        ),
    ],
)
def test_the_arms_name_the_side(
    rollout: np.ndarray, training: np.ndarray, both: np.ndarray, diagnosis: Diagnosis, start: str
) -> None:
    found = _judge(NATIVE, rollout, training, both)
    assert found.diagnosis is diagnosis
    assert found.reason.startswith(start)
    assert [effect.arm for effect in found.effects] == list(Arm)[1:]


def test_both_sides_are_judged_alike() -> None:
    """Exchanging the one-sided arms exchanges the sides and changes no figure."""
    found = _judge(NATIVE, HALF, _redrawn(NATIVE, 1), HALF)
    mirrored = _judge(NATIVE, _redrawn(NATIVE, 1), HALF, HALF)
    assert (found.diagnosis, mirrored.diagnosis) == (
        Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
        Diagnosis.CAUSED_BY_TRAINING_SIDE,
    )
    assert found.reason.replace("on rollout alone", "on training alone") == mirrored.reason
    assert [e.p_value for e in found.effects[:2]] == [e.p_value for e in mirrored.effects[:2]][::-1]


def test_the_tail_accuses_where_the_mean_stays() -> None:
    """Clipped tokens in most sequences vanish, and the mean hardly moves: clip_fraction decides."""
    native = _noise(24, 400, scale=0.02)
    native[:, 0], healed = 0.3, native.copy()
    healed[:, 0] = 0.15
    found = _judge(native, healed, native.copy(), healed)
    effect = found.effects[0]
    assert abs(effect.dlogp_change) < 0.1 * float(np.abs(native).mean())
    assert (found.diagnosis, effect.clip_events_removed, effect.clip_events_added) == (
        Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
        24,
        0,
    )


def test_an_arm_in_which_nothing_was_found_is_not_shown_to_differ() -> None:
    """The training's reference helps in nine sequences of ten, which is not significant and nearly as much."""
    native = np.full((10, 8), 0.1)
    nearly = 0.5 * native
    nearly[0] = 0.11
    found = _judge(native, 0.5 * native, nearly, 0.5 * native)
    assert [effect.p_value <= LEVEL for effect in found.effects] == [True, False, True]
    assert found.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE
    assert found.reason.startswith("rollout_reference_only lowers the mismatch (mean |dlogp| 0.1000 → 0.0500")
    assert found.reason.endswith("so the side is open; score more sequences.")


def test_a_certain_but_small_change_accuses_nobody() -> None:
    found = _judge(NATIVE, 0.95 * NATIVE, NATIVE, 0.95 * NATIVE)
    assert found.effects[0].p_value < 1e-3
    assert found.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE


@pytest.mark.parametrize(
    ("sequences", "diagnosis"),
    [
        pytest.param(2, Diagnosis.INSUFFICIENT_EVIDENCE, id="two sequences"),
        pytest.param(9, Diagnosis.INSUFFICIENT_EVIDENCE, id="nine sequences"),
        pytest.param(10, Diagnosis.CAUSED_BY_TRAINING_SIDE, id="ten sequences"),
    ],
)
def test_few_sequences_cannot_accuse_however_many_tokens_they_have(sequences: int, diagnosis: Diagnosis) -> None:
    native = np.full((sequences, 1_000), 0.3)
    found = _judge(native, native, 1e-6 * native, 1e-6 * native)
    assert found.diagnosis is diagnosis


def test_one_sequence_cannot_accuse_and_says_what_would() -> None:
    native = _noise(1, 64)
    found = _judge(native, 1e-6 * native, native, 1e-6 * native)
    assert found.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE
    assert found.reason.endswith("score more sequences (10 at least) to resolve anything.")


def test_an_unresolved_factor_says_how_many_tokens_would_do() -> None:
    found = _judge(NATIVE, _redrawn(NATIVE, 1), _redrawn(NATIVE, 2), _redrawn(NATIVE, 3))
    widest = max(found.effects, key=lambda effect: effect.resolvable)
    mismatch = float(np.abs(NATIVE).mean())
    assert widest.tokens_needed is not None and widest.tokens_needed > 24 * 64
    assert found.reason == (
        f"Nothing is resolved: mean |dlogp| is {mismatch:.4f}, and 1536 tokens of 24 sequences resolve a change of "
        f"{widest.resolvable:.4f} or more, and about {widest.tokens_needed} tokens would resolve {0.1 * mismatch:.4f}, "
        "a tenth of it."
    )


def test_many_tokens_without_an_effect_clear_nobody() -> None:
    native = _noise(64, 1_500)
    redrawn = [native * np.where(_noise(*native.shape, seed=seed) > 0, 1.01, 0.99) for seed in (1, 2, 3)]
    found = _judge(native, *redrawn)
    assert found.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE
    assert "96000 tokens of 64 sequences resolve a change of 0.00" in found.reason
    assert found.reason.endswith("so this clears nobody: the aligned origin would tell.")


def test_a_reference_that_changes_no_bit_is_not_this_factor() -> None:
    found = _judge(NATIVE, NATIVE, NATIVE, NATIVE)
    assert (found.diagnosis, found.reason) == (
        Diagnosis.NOT_THIS_FACTOR,
        "The reference changes no bit of any of 1536 tokens on either side.",
    )


def test_sides_that_are_equal_natively_have_no_mismatch_to_attribute() -> None:
    equal = np.zeros((24, 64))
    found = _judge(equal, _noise(24, 64), _noise(24, 64, seed=1), equal)
    assert (found.diagnosis, found.reason) == (
        Diagnosis.NOT_THIS_FACTOR,
        "All 1536 tokens are equal to the bit natively; there is no mismatch to attribute.",
    )


def test_one_changed_bit_is_not_cleared() -> None:
    changed = NATIVE.copy()
    changed[0, 0] += 1e-12
    assert _judge(NATIVE, changed, NATIVE, changed).diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_native_values_that_are_no_numbers_judge_nothing(value: float) -> None:
    native = NATIVE.copy()
    native[0, :2] = value
    found = _judge(native, HALF, HALF, HALF)
    assert (found.diagnosis, found.reason) == (
        Diagnosis.INSUFFICIENT_EVIDENCE,
        "2 of 1536 tokens have a log-prob that is NaN or infinite in both_native.",
    )


@pytest.mark.parametrize(("index", "arm"), [(1, Arm.ROLLOUT_REFERENCE_ONLY), (2, Arm.TRAINING_REFERENCE_ONLY)])
def test_a_reference_that_gives_no_number_is_broken(index: int, arm: Arm) -> None:
    broken = HALF.copy()
    broken[3, 5] = np.nan
    rows = [NATIVE, HALF, HALF, broken]
    rows[index] = broken
    found = _judge(*rows)
    assert (found.diagnosis, found.reason, found.effects) == (
        Diagnosis.REFERENCE_ITSELF_IS_BROKEN,
        f"What is bound gives 1 of 1536 tokens a log-prob that is NaN or infinite ({arm.value}).",
        (),
    )


def test_zero_tokens_are_no_verdict() -> None:
    empty = ArmTokens(training=np.empty(0), rollout=np.empty(0), sequence=np.empty(0, dtype=np.int64))
    found = diagnose_from_native({arm: empty for arm in Arm}, **EPSILONS)
    assert (found.diagnosis, found.reason) == (
        Diagnosis.INSUFFICIENT_EVIDENCE,
        "No active token was scored; nothing was measured.",
    )


@pytest.mark.parametrize(
    ("failed", "diagnosis"),
    [
        pytest.param({GateName.SWITCH_EFFECTIVE}, Diagnosis.VARIANT_DID_NOT_APPLY, id="the switch"),
        pytest.param({GateName.EVIDENCE_COMPLETE}, Diagnosis.INSUFFICIENT_EVIDENCE, id="the evidence"),
        pytest.param({GateName.SHARDS_COMPLETE}, Diagnosis.INSUFFICIENT_EVIDENCE, id="the shards"),
        pytest.param({GateName.PITFALLS_CLEAR}, Diagnosis.INSUFFICIENT_EVIDENCE, id="a pitfall"),
        pytest.param(set(GateName), Diagnosis.VARIANT_DID_NOT_APPLY, id="all of them"),
    ],
)
def test_a_failed_gate_decides_before_any_arm_is_read(failed: Any, diagnosis: Diagnosis) -> None:
    gates = [Gate(name=name, ok=name not in failed, reason=f"{name.value}.") for name in GateName]
    found = blocked(gates)
    assert found is not None
    reasons = " ".join(f"{name.value}." for name in GateName if name in failed)
    assert (found.diagnosis, found.reason, found.effects) == (diagnosis, reasons, ())


def test_gates_that_hold_block_nothing() -> None:
    assert blocked([Gate(name=name, ok=True, reason="") for name in GateName]) is None


# ---- from aligned -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("native", "rollout_reference", "training_reference", "expected"),
    [
        pytest.param(0, 1, 1, Diagnosis.NOT_THIS_FACTOR, id="both sides do the same thing, whatever it is"),
        pytest.param(1, 0, 1, Diagnosis.CAUSED_BY_ROLLOUT_SIDE, id="rollout departs from the reference"),
        pytest.param(1, 1, 0, Diagnosis.CAUSED_BY_TRAINING_SIDE, id="training departs from the reference"),
        pytest.param(1, 1, 1, Diagnosis.CAUSED_BY_BOTH_SIDES, id="each side departs"),
        pytest.param(1, 0, 0, Diagnosis.INSUFFICIENT_EVIDENCE, id="impossible at a bitwise floor"),
        pytest.param(0, 0, 0, Diagnosis.NOT_THIS_FACTOR, id="native is the reference"),
    ],
)
def test_the_aligned_matrix_names_the_side(
    native: int, rollout_reference: int, training_reference: int, expected: Diagnosis
) -> None:
    # One token of 1,536 by the smallest step of fp32 near -2: at a bitwise floor that is enough.
    step = np.zeros((24, 64))
    step[3, 5] = 2.0**-22
    found = diagnose_from_aligned(arms(native * step, rollout_reference * step, training_reference * step, 0 * step))
    assert found.diagnosis is expected


def test_a_self_check_off_the_floor_breaks_the_reference_and_accuses_nobody() -> None:
    found = diagnose_from_aligned(arms(NATIVE, NATIVE, 0 * NATIVE, 1e-9 * NATIVE))
    assert found.diagnosis is Diagnosis.REFERENCE_ITSELF_IS_BROKEN
    assert found.reason.startswith("With every reference on both sides 1536 of 1536 tokens differ")


def test_an_aligned_verdict_prints_what_each_side_does_alone() -> None:
    zero = 0 * NATIVE
    found = diagnose_from_aligned(arms(zero + 0.5, zero, zero + 0.25, zero))
    assert found.reason == (
        "From a floor of 0: rollout native alone moves 1536 of 1536 tokens (mean |dlogp| 0.2500); training native "
        "alone changes no bit; both native moves 1536 of 1536 tokens (mean |dlogp| 0.5000)."
    )


def test_from_native_too_equality_decides_where_the_reference_reaches_it() -> None:
    native = _noise(2, 8)  # far too few sequences for any test
    found = _judge(native, native, 0 * native, 0 * native)
    assert found.diagnosis is Diagnosis.CAUSED_BY_TRAINING_SIDE
    assert len(found.effects) == 3


# ---- sweeps -------------------------------------------------------------------------------------------------------


def _sweep(**values: np.ndarray) -> Finding:
    named = {"native": arm_tokens(NATIVE)} | {f"rollout={name}": arm_tokens(one) for name, one in values.items()}
    return diagnose_sweep(named, **EPSILONS)


def test_a_sweep_ranks_its_values_and_attributes_nothing() -> None:
    found = _sweep(a=0.9 * NATIVE, b=0.1 * NATIVE)
    assert found.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE
    assert [effect.arm for effect in found.effects] == ["rollout=b", "rollout=a"]
    assert found.reason.startswith("A sweep measures and cannot attribute. rollout=b changes 1536 of 1536 tokens, mean")


def test_a_sweep_names_the_side_where_only_the_live_runs_own_value_parts_the_sides() -> None:
    equal, live = arm_tokens(0 * NATIVE), ("rollout=decode", PolicyRole.ROLLOUT)
    found = diagnose_sweep({"native": equal, "rollout=decode": arm_tokens(NATIVE)}, live=live, **EPSILONS)
    assert found.diagnosis is Diagnosis.CAUSED_BY_ROLLOUT_SIDE
    assert "rollout alone moves 1536 of 1536 tokens" in found.reason
    # Neither side is known to be right once they differ as they are scored, and a value that no run has accuses nobody.
    noisy = {"native": arm_tokens(0.5 * NATIVE), "rollout=decode": arm_tokens(NATIVE)}
    assert diagnose_sweep(noisy, live=live, **EPSILONS).diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE
    other = {"native": equal, "rollout=other": arm_tokens(NATIVE)}
    assert diagnose_sweep(other, **EPSILONS).diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE


def test_a_sweep_whose_values_change_no_bit_is_not_this_factor() -> None:
    found = _sweep(a=NATIVE, b=NATIVE)
    assert found.diagnosis is Diagnosis.NOT_THIS_FACTOR
    assert found.reason == "No value (rollout=a, rollout=b) changes a bit of any of 1536 tokens."


def test_a_sweep_of_nothing_judges_nothing() -> None:
    empty = np.zeros((0, 0))
    found = diagnose_sweep({"native": arm_tokens(empty), "rollout=a": arm_tokens(empty)}, **EPSILONS)
    assert found.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE


# ---- contents -----------------------------------------------------------------------------------------------------


def _content(rollout: Mapping[str, str], *, since: int | None = None) -> Finding:
    trainer = {"a": "1", "b": "2", "c": "3"}
    return diagnose_content(digest(ROLLOUT, rollout), digest(TRAINING, trainer), differing_since=since)


@pytest.mark.parametrize(
    ("rollout", "since", "diagnosis", "reason"),
    [
        pytest.param(
            {"a": "1", "b": "2", "c": "3"},
            None,
            Diagnosis.NOT_THIS_FACTOR,
            "All 3 tensors hold the same bits on both sides.",
            id="equal",
        ),
        pytest.param(
            {"a": "1", "b": "0", "c": "3"},
            7,
            Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
            "The rollout side does not hold the trainer's weights: 1 of 3 tensors were not updated as the trainer has "
            "them, since step 7 at the latest (b).",
            id="a partial sync",
        ),
        pytest.param(
            {"a": "0", "b": "0", "c": "0"},
            None,
            Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
            "The rollout side does not hold the trainer's weights: none of them was updated as the trainer has them "
            "(a, b, c).",
            id="a sync that delivered nothing",
        ),
        pytest.param(
            {"a": "1", "b": "2"},
            None,
            Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
            "The rollout side does not hold the trainer's weights: 1 of 3 tensors were not updated as the trainer has "
            "them (c).",
            id="a tensor that the rollout side lacks",
        ),
    ],
)
def test_a_comparison_of_contents_names_the_tensors(
    rollout: Mapping[str, str], since: int | None, diagnosis: Diagnosis, reason: str
) -> None:
    found = _content(rollout, since=since)
    assert (found.diagnosis, found.reason) == (diagnosis, reason)
