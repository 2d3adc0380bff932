"""Read the arms of one factor, gates first, so that no unmeasured arm is ever read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mismatch_hooks.pipeline.score import ArmTokens, FloatArray
from mismatch_hooks.pipeline.statistics import LEVEL, RELEVANT_SHARE, paired_effect
from mismatch_hooks.schema.enums import Arm, Diagnosis, ExpectedOutcome, GateName, Origin, PolicyRole
from mismatch_hooks.schema.factor import BASELINE
from mismatch_hooks.schema.score import WeightsDigest
from mismatch_hooks.schema.verdict import Gate, PairedEffect


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A diagnosis with the sentence that explains it, and the effects it was read from."""

    diagnosis: Diagnosis
    reason: str
    effects: tuple[PairedEffect, ...] = ()


# (rollout_reference_only, training_reference_only, both_reference) lowers the mismatch, from the NATIVE origin.
_FROM_NATIVE = {
    (True, False, True): Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
    (False, True, True): Diagnosis.CAUSED_BY_TRAINING_SIDE,
    (False, False, True): Diagnosis.CAUSED_BY_BOTH_SIDES,
    (True, False, False): Diagnosis.COUPLED_WITH_OTHER_FACTORS,
    (False, True, False): Diagnosis.COUPLED_WITH_OTHER_FACTORS,
    # Either swap alone helps: the side cannot be told from here, only from the aligned origin.
    (True, True, True): Diagnosis.INSUFFICIENT_EVIDENCE,
    (True, True, False): Diagnosis.INSUFFICIENT_EVIDENCE,
    (False, False, False): Diagnosis.INSUFFICIENT_EVIDENCE,
}


def blocked(gates: Sequence[Gate]) -> Finding | None:
    """Return what a failed gate makes of the verdict, or None when all gates hold."""
    failed = [gate for gate in gates if not gate.ok]
    if not failed:
        return None
    did_not_apply = any(gate.name is GateName.SWITCH_EFFECTIVE for gate in failed)
    diagnosis = Diagnosis.VARIANT_DID_NOT_APPLY if did_not_apply else Diagnosis.INSUFFICIENT_EVIDENCE
    return Finding(diagnosis=diagnosis, reason=" ".join(gate.reason for gate in failed))


def diagnose_from_native(arms: Mapping[str, ArmTokens], *, epsilon_low: float, epsilon_high: float) -> Finding:
    """Read four arms at a noisy floor: every other operator is native, so a swap also re-draws their rounding.

    NOT_THIS_FACTOR is said only when the reference changes no bit on either side, or when nothing differs natively.
    An arm that does not lower the mismatch clears nobody: sources saturate, and one of several can be removed without
    an effect. Then the answer is INSUFFICIENT_EVIDENCE, with what these tokens could have resolved.

    Callers pass gates through ``blocked`` first.
    """
    unreadable = _unreadable(arms, native=Arm.BOTH_NATIVE)
    if unreadable is not None:
        return unreadable
    native = arms[Arm.BOTH_NATIVE]
    tokens = native.training.size
    effects = _effects(arms, native=Arm.BOTH_NATIVE, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    if not np.any(native.dlogp):
        reason = f"All {tokens} tokens are equal to the bit natively; there is no mismatch to attribute."
        return Finding(diagnosis=Diagnosis.NOT_THIS_FACTOR, reason=reason, effects=effects)
    if not any(effect.bits_changed for effect in effects):
        reason = f"The reference changes no bit of any of {tokens} tokens on either side."
        return Finding(diagnosis=Diagnosis.NOT_THIS_FACTOR, reason=reason, effects=effects)
    if not np.any(arms[Arm.BOTH_REFERENCE].dlogp):
        # Nothing but this factor differs, so the floor is bitwise from here too, and equality needs no statistics.
        return replace(diagnose_from_aligned(arms), effects=effects)
    mismatch = float(np.abs(native.dlogp).mean())
    by_arm = {effect.arm: effect for effect in effects}
    lowers = (
        _lowers(by_arm[Arm.ROLLOUT_REFERENCE_ONLY], mismatch),
        _lowers(by_arm[Arm.TRAINING_REFERENCE_ONLY], mismatch),
        _lowers(by_arm[Arm.BOTH_REFERENCE], mismatch),
    )
    alike = _alike(lowers, arms, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    if alike is not None:
        better, worse = alike
        reason = (
            f"{better} lowers the mismatch ({_change(by_arm[better], mismatch)}) and cannot be told from {worse} "
            f"({_change(by_arm[worse], mismatch)}), so the side is open; score more sequences."
        )
        return Finding(diagnosis=Diagnosis.INSUFFICIENT_EVIDENCE, reason=reason, effects=effects)
    return Finding(diagnosis=_FROM_NATIVE[lowers], reason=_explain(lowers, by_arm, mismatch), effects=effects)


# (rollout_reference_only, training_reference_only, both_reference) lowers the mismatch: which arm must then lie below
# which. That a test found nothing in an arm does not show that nothing is there; that it lies above another one does.
_BELOW = {
    (True, False, True): ((Arm.ROLLOUT_REFERENCE_ONLY, Arm.TRAINING_REFERENCE_ONLY),),
    (False, True, True): ((Arm.TRAINING_REFERENCE_ONLY, Arm.ROLLOUT_REFERENCE_ONLY),),
    (False, False, True): (
        (Arm.BOTH_REFERENCE, Arm.ROLLOUT_REFERENCE_ONLY),
        (Arm.BOTH_REFERENCE, Arm.TRAINING_REFERENCE_ONLY),
    ),
    (True, False, False): ((Arm.ROLLOUT_REFERENCE_ONLY, Arm.BOTH_REFERENCE),),
    (False, True, False): ((Arm.TRAINING_REFERENCE_ONLY, Arm.BOTH_REFERENCE),),
}


def _alike(
    lowers: tuple[bool, bool, bool], arms: Mapping[str, ArmTokens], *, epsilon_low: float, epsilon_high: float
) -> tuple[Arm, Arm] | None:
    """The first two arms that the diagnosis needs to be different and the tokens cannot tell apart."""
    for better, worse in _BELOW.get(lowers, ()):
        effect = paired_effect(better, arms[better], arms[worse], epsilon_low=epsilon_low, epsilon_high=epsilon_high)
        if not _lowers(effect, 0.0):
            return better, worse
    return None


def diagnose_pairs(
    finding: Finding, native: ArmTokens, pairs: Mapping[str, ArmTokens], *, epsilon_low: float, epsilon_high: float
) -> Finding:
    """Name the partners with which a coupled factor's reference lowers the mismatch after all.

    A pair is one more two-sided test of each of two figures, accusing in one direction only, so each of P pairs is read
    at ``LEVEL`` / P (Bonferroni).

    Args:
        finding: ``COUPLED_WITH_OTHER_FACTORS``, of the factor alone.
        native: the arm in which both sides are native.
        pairs: partner's id to the arm in which both factors are on their references on both sides.
        epsilon_low: clip range, as read back from the loop.
        epsilon_high: likewise.
    """
    mismatch = float(np.abs(native.dlogp).mean())
    effects = {
        partner: paired_effect(pair_arm(partner), arm, native, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
        for partner, arm in pairs.items()
    }
    level = LEVEL / max(1, len(pairs))
    found = [name for name, effect in effects.items() if _lowers(effect, mismatch, level=level)]
    if found:
        said = "; ".join(f"{name}: {_change(effects[name], mismatch)}" for name in found)
        reason = f"{finding.reason} With the reference of another factor beside it the mismatch does fall: {said}."
    else:
        reason = f"{finding.reason} No second factor's reference beside it lowers the mismatch ({', '.join(pairs)})."
    return replace(finding, reason=reason, effects=(*finding.effects, *effects.values()))


def pair_arm(partner: str) -> str:
    """The name of the arm in which a factor and ``partner`` are on their references on both sides."""
    return f"{Arm.BOTH_REFERENCE}+{partner}"


_MOST_NAMES = 6
_ONE_SIDE = {
    PolicyRole.ROLLOUT: Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
    PolicyRole.TRAINING: Diagnosis.CAUSED_BY_TRAINING_SIDE,
}

# (rollout is native, training is native) lies above the floor where both_native does, from the ALIGNED origin.
_FROM_ALIGNED = {
    (True, False): Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
    (False, True): Diagnosis.CAUSED_BY_TRAINING_SIDE,
    (True, True): Diagnosis.CAUSED_BY_BOTH_SIDES,
    # Each side alone equals the reference to the bit, so both together must: the measurement is broken.
    (False, False): Diagnosis.INSUFFICIENT_EVIDENCE,
}


def diagnose_from_aligned(arms: Mapping[str, ArmTokens]) -> Finding:
    """Read four arms at a bitwise floor: every other operator is on its reference, so nothing but this factor differs.

    The floor is equality of every token; no statistics are needed. ``both_reference`` must sit on it.

    Callers pass gates through ``blocked`` first.
    """
    unreadable = _unreadable(arms, native=Arm.BOTH_NATIVE)
    if unreadable is not None:
        return unreadable
    above = {arm: int(np.count_nonzero(values.dlogp)) for arm, values in arms.items()}
    tokens = arms[Arm.BOTH_NATIVE].training.size
    exact = [arm for arm in Arm if arm.expected(Origin.ALIGNED) is ExpectedOutcome.BITWISE_IDENTICAL]
    if any(above[arm] for arm in exact):
        reason = (
            f"With every reference on both sides {max(above[arm] for arm in exact)} of {tokens} tokens differ: the "
            "reference, or something that no factor covers, is not the same on the two sides."
        )
        return Finding(diagnosis=Diagnosis.REFERENCE_ITSELF_IS_BROKEN, reason=reason)
    if not above[Arm.BOTH_NATIVE]:
        reason = (
            f"With this factor native on both sides all {tokens} tokens are equal to the bit: the same input gives the "
            "same bits, so it is no source, though it may amplify what others cause."
        )
        return Finding(diagnosis=Diagnosis.NOT_THIS_FACTOR, reason=reason)
    rollout, training = Arm.TRAINING_REFERENCE_ONLY, Arm.ROLLOUT_REFERENCE_ONLY  # the side that is native in each
    return Finding(
        diagnosis=_FROM_ALIGNED[above[rollout] > 0, above[training] > 0],
        reason=f"From a floor of 0: rollout native alone {_departs(arms[rollout])}; training native alone "
        f"{_departs(arms[training])}; both native {_departs(arms[Arm.BOTH_NATIVE])}.",
    )


def _departs(values: ArmTokens) -> str:
    differing = int(np.count_nonzero(values.dlogp))
    if not differing:
        return "changes no bit"
    mean = float(np.abs(values.dlogp).mean())
    return f"moves {differing} of {values.training.size} tokens (mean |dlogp| {mean:.4f})"


def diagnose_sweep(
    arms: Mapping[str, ArmTokens],
    *,
    live: tuple[str, PolicyRole] | None = None,
    epsilon_low: float,
    epsilon_high: float,
) -> Finding:
    """Rank the values of a sweep by what they do to the mismatch; a sweep has no reference and accuses nobody.

    NOT_THIS_FACTOR is said when no value changes a bit. Otherwise the answer is INSUFFICIENT_EVIDENCE, with every
    value's effect and interval, the largest reduction first.

    One case needs no reference: where both sides are equal to the bit as they are scored, and the live run has another
    value on one side that moves bits, the whole difference is inside that side.

    Callers pass gates through ``blocked`` first.

    Args:
        arms: by name, the one in which both sides are native among them.
        live: the arm that the live run is in, and the role whose value it is; None where that is the native one.
        epsilon_low: clip range, as read back from the loop.
        epsilon_high: likewise.
    """
    unreadable = _unreadable(arms, native=BASELINE)
    if unreadable is not None:
        return unreadable
    effects = _effects(arms, native=BASELINE, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    tokens = arms[BASELINE].training.size
    if not any(effect.bits_changed for effect in effects):
        named = ", ".join(effect.arm for effect in effects)
        reason = f"No value ({named}) changes a bit of any of {tokens} tokens."
        return Finding(diagnosis=Diagnosis.NOT_THIS_FACTOR, reason=reason, effects=effects)
    if live is not None and not np.any(arms[BASELINE].dlogp) and np.any(arms[live[0]].dlogp):
        reason = (
            f"As a scoring pass computes them all {tokens} tokens are equal to the bit; as the live run does "
            f"({live[0]}), {live[1].value} alone {_departs(arms[live[0]])}, so the difference is inside that side."
        )
        return Finding(diagnosis=_ONE_SIDE[live[1]], reason=reason, effects=effects)
    ranked = sorted(effects, key=lambda effect: effect.dlogp_change)
    mismatch = float(np.abs(arms[BASELINE].dlogp).mean())
    said = "; ".join(
        f"{effect.arm} changes {effect.bits_changed} of {tokens} tokens, {_change(effect, mismatch)}"
        for effect in ranked
    )
    return Finding(
        diagnosis=Diagnosis.INSUFFICIENT_EVIDENCE,
        reason=f"A sweep measures and cannot attribute. {said}.",
        effects=tuple(ranked),
    )


def diagnose_native_path(
    finding: Finding, prefilled: FloatArray, as_live: FloatArray, arm: str, role: PolicyRole
) -> Finding:
    """Read a sweep from ALIGNED once more with nothing bound, where the live run has another value than a scoring pass.

    References are the same bits on every path by construction, so from there alone no path could ever be named.

    Args:
        finding: of the sweep with every reference bound.
        prefilled: ``[tokens]`` fp64, nats: active tokens as a native scoring pass gives them.
        as_live: likewise with the live run's value.
        arm: of the live run's value.
        role: whose value it is.
    """
    moved = int(np.count_nonzero(prefilled != as_live))
    if finding.diagnosis is not Diagnosis.NOT_THIS_FACTOR or not moved:
        return finding
    mean = float(np.abs(prefilled - as_live).mean())
    reason = (
        f"With every reference bound no value changes a bit. As nobody touches it, {arm} alone moves {moved} of "
        f"{prefilled.size} tokens (mean |dlogp| {mean:.4f}), so the difference is inside the {role.value} side: in "
        "operators of it that give other bits there."
    )
    return replace(finding, diagnosis=_ONE_SIDE[role], reason=reason)


def diagnose_content(rollout: WeightsDigest, training: WeightsDigest, *, differing_since: int | None) -> Finding:
    """Compare what is loaded on both sides; the trainer's tensors are what a sync should have delivered.

    Callers pass gates through ``blocked`` first: an unreadable tensor is neither equal nor different.

    Args:
        rollout: digests of the rollout side.
        training: digests of the trainer.
        differing_since: the step at which the first of the differing tensors was seen to differ, if it is known.
    """
    ours, theirs = training.tensors, rollout.tensors
    names = [*ours, *(name for name in theirs if name not in ours)]
    differing = [name for name in names if ours.get(name) != theirs.get(name)]
    if not differing:
        reason = f"All {len(names)} tensors hold the same bits on both sides."
        return Finding(diagnosis=Diagnosis.NOT_THIS_FACTOR, reason=reason)
    since = "" if differing_since is None else f", since step {differing_since} at the latest"
    shown = ", ".join(differing[:_MOST_NAMES]) + (", …" if len(differing) > _MOST_NAMES else "")
    how = "none of them was" if len(differing) == len(names) else f"{len(differing)} of {len(names)} tensors were not"
    return Finding(
        diagnosis=Diagnosis.CAUSED_BY_ROLLOUT_SIDE,
        reason=f"The rollout side does not hold the trainer's weights: {how} updated as the trainer has them{since} "
        f"({shown}).",
    )


def _unreadable(arms: Mapping[str, ArmTokens], *, native: str) -> Finding | None:
    """What is said where there is nothing to compare, or a log-prob that is no number."""
    tokens = arms[native].training.size
    if tokens == 0:
        return Finding(
            diagnosis=Diagnosis.INSUFFICIENT_EVIDENCE, reason="No active token was scored; nothing was measured."
        )
    for arm, values in arms.items():
        missing = int((~np.isfinite(values.dlogp)).sum())
        if missing and arm == native:
            reason = f"{missing} of {tokens} tokens have a log-prob that is NaN or infinite in {arm}."
            return Finding(diagnosis=Diagnosis.INSUFFICIENT_EVIDENCE, reason=reason)
        if missing:
            reason = f"What is bound gives {missing} of {tokens} tokens a log-prob that is NaN or infinite ({arm})."
            return Finding(diagnosis=Diagnosis.REFERENCE_ITSELF_IS_BROKEN, reason=reason)
    return None


def _effects(
    arms: Mapping[str, ArmTokens], *, native: str, epsilon_low: float, epsilon_high: float
) -> tuple[PairedEffect, ...]:
    return tuple(
        paired_effect(arm, values, arms[native], epsilon_low=epsilon_low, epsilon_high=epsilon_high)
        for arm, values in arms.items()
        if arm != native
    )


def _lowers(effect: PairedEffect, mismatch: float, *, level: float = LEVEL) -> bool:
    fewer_clipped = effect.clip_clustered_p_value <= level and effect.clip_events_removed > effect.clip_events_added
    smaller = effect.p_value <= level and effect.dlogp_change <= -RELEVANT_SHARE * mismatch
    return fewer_clipped or smaller


def _explain(lowers: tuple[bool, bool, bool], effects: Mapping[str, PairedEffect], mismatch: float) -> str:
    rollout, training, both = (
        _change(effects[arm], mismatch)
        for arm in (Arm.ROLLOUT_REFERENCE_ONLY, Arm.TRAINING_REFERENCE_ONLY, Arm.BOTH_REFERENCE)
    )
    if not any(lowers):
        return _unresolved(effects, mismatch)
    if lowers[0] and lowers[1]:
        return (
            "Either reference alone lowers the mismatch, and the native origin cannot tell the side. "
            f"On rollout: {rollout}. On training: {training}."
        )
    if not lowers[2]:
        return (
            "One side's reference lowers the mismatch and both together do not: this factor interacts with operators "
            f"that are still native. With both: {both}."
        )
    if lowers[0]:
        return f"The reference on rollout alone lowers the mismatch: {rollout}."
    if lowers[1]:
        return f"The reference on training alone lowers the mismatch: {training}."
    return f"Only both references together lower the mismatch, so each side departs from the reference: {both}."


def _change(effect: PairedEffect, mismatch: float) -> str:
    low, high = effect.interval
    clipped = effect.clip_events_added - effect.clip_events_removed
    return (
        f"mean |dlogp| {mismatch:.4f} → {mismatch + effect.dlogp_change:.4f} "
        f"(change in [{low:+.4f}, {high:+.4f}]), clipped tokens {clipped:+d} of {effect.tokens}"
    )


def _unresolved(effects: Mapping[str, PairedEffect], mismatch: float) -> str:
    effect = max(effects.values(), key=lambda effect: effect.resolvable)
    reason = (
        f"Nothing is resolved: mean |dlogp| is {mismatch:.4f}, and {effect.tokens} tokens of {effect.sequences} "
        f"sequences resolve a change of {effect.resolvable:.4f} or more"
    )
    if effect.tokens_needed is None:
        return f"{reason}; score more sequences (10 at least) to resolve anything."
    relevant = RELEVANT_SHARE * mismatch
    if effect.tokens_needed > effect.tokens:
        return f"{reason}, and about {effect.tokens_needed} tokens would resolve {relevant:.4f}, a tenth of it."
    return (
        f"{reason}. From native, one source of several can be removed without an effect, so this clears nobody: "
        "the aligned origin would tell."
    )
