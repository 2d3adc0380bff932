"""What four arms mean from the native origin, on the heavy-tailed differences that real engines show."""

from typing import Any

import numpy as np
import pytest

from mismatch_hooks.pipeline.diagnose import Finding, blocked, diagnose_from_native
from mismatch_hooks.pipeline.score import ArmTokens
from mismatch_hooks.schema.enums import Arm, Diagnosis, GateName
from mismatch_hooks.schema.verdict import Gate
from tests.pipeline.samples import EPSILONS, arms


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
    found = _judge(native, native, 0.0 * native, 0.0 * native)
    assert found.diagnosis is diagnosis


def test_one_sequence_cannot_accuse_and_says_what_would() -> None:
    native = _noise(1, 64)
    found = _judge(native, 0.0 * native, native, 0.0 * native)
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
        f"The reference gives 1 of 1536 tokens a log-prob that is NaN or infinite ({arm.value}).",
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
