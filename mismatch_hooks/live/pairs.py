"""After a factor was found to be coupled: score it together with each other factor, and name the partners."""

import time
from collections.abc import Mapping
from dataclasses import replace

from mismatch_hooks.live.passes import ScoringRun, Watched
from mismatch_hooks.pipeline.diagnose import Finding, diagnose_pairs, pair_arm
from mismatch_hooks.pipeline.score import ArmTokens, read_arm
from mismatch_hooks.schema.enums import Arm, Choice, Expansion, PolicyRole
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.plan import Plan
from mismatch_hooks.schema.verdict import ArmReading, Verdict

_ROLES = (PolicyRole.ROLLOUT, PolicyRole.TRAINING)


def with_pairs(
    verdict: Verdict,
    factor: MismatchFactor,
    plan: Plan,
    run: ScoringRun,
    before: Mapping[PolicyRole, Watched],
    *,
    left_s: float,
) -> Verdict:
    """Return the verdict with one more arm for each partner: both factors on their references on both sides.

    Args:
        verdict: ``COUPLED_WITH_OTHER_FACTORS``, from native.
        factor: whose verdict it is.
        plan: the partners are its other four-arm factors, in order.
        run: the ablation's passes.
        before: each role with nothing bound.
        left_s: seconds; a pair that would not end in time is not begun, and the verdict names it.
    """
    started = time.perf_counter()
    partners = [
        case.factor.id
        for case in plan.cases
        if case.factor.expansion is Expansion.STANDARD_FOUR
        and case.factor.id != factor.id
        and case.factor.id not in run.refused
    ]
    batch = run.batch
    epsilons = {"epsilon_low": batch.epsilon_low, "epsilon_high": batch.epsilon_high}
    pairs: dict[str, tuple[ArmTokens, ArmReading]] = {}
    slowest = 0.0
    for partner in partners:
        begun = time.perf_counter()
        if begun - started + slowest > left_s:
            break
        choices = {factor.id: Choice.REFERENCE, partner: Choice.REFERENCE}
        scores = {role: run.score(role, choices).score for role in _ROLES}
        pairs[partner] = read_arm(pair_arm(partner), scores, batch.sequences, **epsilons)
        slowest = max(slowest, time.perf_counter() - begun)
    later = partners[len(pairs) :]
    unscored = f" No time was left to score it with {', '.join(later)}." if later else ""
    if not pairs:
        return replace(verdict, reason=verdict.reason + unscored)
    native, _ = read_arm(Arm.BOTH_NATIVE, {role: before[role].score for role in _ROLES}, batch.sequences, **epsilons)
    finding = diagnose_pairs(
        Finding(diagnosis=verdict.diagnosis, reason=verdict.reason, effects=verdict.effects),
        native,
        {partner: tokens for partner, (tokens, _) in pairs.items()},
        **epsilons,
    )
    return replace(
        verdict,
        reason=finding.reason + unscored,
        effects=finding.effects,
        arms=(*verdict.arms, *(reading for _, reading in pairs.values())),
        passes=verdict.passes + 2 * len(pairs),
        seconds=verdict.seconds + time.perf_counter() - started,
    )
