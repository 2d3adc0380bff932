"""Judge one factor: score what its arms need, evaluate the gates, read the arms."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from mismatch_hooks.live.passes import ScoringRun, Watched
from mismatch_hooks.live.replay import disagreement
from mismatch_hooks.pipeline.bind import BindingError, RestoreError
from mismatch_hooks.pipeline.contracts import compare_contracts, contract_of, repeats_differ
from mismatch_hooks.pipeline.diagnose import (
    Finding,
    blocked,
    diagnose_content,
    diagnose_from_aligned,
    diagnose_from_native,
    diagnose_native_path,
    diagnose_sweep,
)
from mismatch_hooks.pipeline.evidence import missing_evidence
from mismatch_hooks.pipeline.report import recommend, report
from mismatch_hooks.pipeline.score import ArmTokens, PassKey, active_logprobs, read_arms
from mismatch_hooks.pipeline.verify import verify, verify_content
from mismatch_hooks.schema.contract import ComparisonIssue
from mismatch_hooks.schema.enums import (
    Choice,
    Diagnosis,
    ExecutionPath,
    Expansion,
    GateName,
    NoiseFloor,
    Origin,
    PolicyRole,
)
from mismatch_hooks.schema.environment import ExecutionFingerprint
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.plan import Candidate
from mismatch_hooks.schema.replay import OperatorReplay
from mismatch_hooks.schema.score import Score, WeightsDigest
from mismatch_hooks.schema.verdict import ArmReading, Gate, Verdict

_ROLES = (PolicyRole.ROLLOUT, PolicyRole.TRAINING)
_PREFILL, _DECODE = ExecutionPath.ROLLOUT_FULL_PREFILL, ExecutionPath.ROLLOUT_DECODE


def judge(
    case: Candidate,
    run: ScoringRun,
    before: Mapping[PolicyRole, Watched],
    noise_floor: NoiseFloor,
    pitfalls: Sequence[str],
    notes: Sequence[str],
    execution: ExecutionFingerprint,
    origin: Origin,
    path: ExecutionPath,
) -> Verdict:
    """Score the arms of one factor and read them, gates first.

    Args:
        case: what is examined.
        run: the ablation's passes.
        before: each role at the origin, on ``path``.
        noise_floor: how noisy the run is.
        pitfalls: sentences of the guards that were tripped.
        notes: sentences that a reader of the verdict should know.
        execution: what was read around the passes.
        origin: what the other factors are bound to.
        path: how the rollout side is scored.
    """
    started = time.perf_counter()
    batch, factor = run.batch, case.factor
    readings: tuple[ArmReading, ...] = ()
    watched: dict[PassKey, Watched] = {}
    repeated = 0
    replays: tuple[OperatorReplay, ...] = ()
    try:
        if factor.expansion is Expansion.CONTENT:
            rollout, training = (batch.weights[role] for role in _ROLES)
            gates = verify_content(rollout, training)
            finding = blocked(gates) or diagnose_content(rollout, training, differing_since=batch.differing_since)
        elif factor.id in run.refused:
            raise BindingError(run.refused[factor.id])
        else:
            watched = _passes(factor, run, before, path)
            passes = {key: one.score for key, one in watched.items()}
            other_side = {key[0]: one.other_side for key, one in watched.items() if key[1] is not Choice.NATIVE}
            missing = missing_evidence(factor, execution, case.reference)
            gates = verify(factor, passes, other_side, batch.sequences, pitfalls, notes, missing)
            read = blocked(gates)
            if read is None and path is _PREFILL:
                repeated = len(case.repeats) * len(factor.switch.roles)
                read = _diagnose_repeats(case, run, watched)
                if read is None and factor.expansion is Expansion.STANDARD_FOUR:
                    replays = _replays(factor, run)
                    read = _diagnose_references(replays, batch.weights)
            if read is None:
                epsilons = {"epsilon_low": batch.epsilon_low, "epsilon_high": batch.epsilon_high}
                arms, readings = read_arms(factor, passes, batch.sequences, **epsilons)
                read = _diagnose(factor, origin, arms, **epsilons)
            finding = read
    except BindingError as refused:
        gates = _refused(str(refused))
        finding = Finding(diagnosis=Diagnosis.VARIANT_DID_NOT_APPLY, reason=str(refused))
    return report(
        factor,
        finding,
        gates=gates,
        arms=readings,
        origin=origin,
        noise_floor=noise_floor,
        path=path,
        tokens=batch.tokens,
        passes=len(watched) + repeated,
        seconds=time.perf_counter() - started,
        fingerprint=execution.digest,
        issues=_issues(factor, execution),
        replays=replays,
    )


def as_the_run_is(
    verdict: Verdict,
    factor: MismatchFactor,
    run: ScoringRun,
    native: Mapping[PolicyRole, Score],
    paths: Mapping[str, Mapping[str, float]],
) -> Verdict:
    """Score the live run's value of a sweep natively too, where the live values differ from a native scoring pass."""
    if factor.live_arm is None or verdict.diagnosis is not Diagnosis.NOT_THIS_FACTOR:
        return verdict
    if paths["live_against_prefill"]["bitwise_fraction"] == 1.0:
        return verdict
    started = time.perf_counter()
    arm, role = factor.live_arm
    sequences = run.batch.sequences
    as_live = run.as_live(role, {factor.id: factor.live_value})
    finding = diagnose_native_path(
        Finding(diagnosis=verdict.diagnosis, reason=verdict.reason, effects=verdict.effects),
        active_logprobs(native[role], sequences),
        active_logprobs(as_live, sequences),
        arm,
        role,
    )
    return replace(
        verdict,
        diagnosis=finding.diagnosis,
        reason=finding.reason,
        recommendation=recommend(factor, finding, readable=True),
        passes=verdict.passes + 1,
        seconds=verdict.seconds + time.perf_counter() - started,
    )


def _issues(factor: MismatchFactor, execution: ExecutionFingerprint) -> tuple[ComparisonIssue, ...]:
    if not factor.contract:
        return ()
    rollout, training = (contract_of(execution.settings[role], factor.contract) for role in _ROLES)
    return compare_contracts(rollout, training, factor.comparison_rules, factor.equivalences)


def _diagnose_repeats(case: Candidate, run: ScoringRun, watched: Mapping[PassKey, Watched]) -> Finding | None:
    """What follows where a reference that claims every topology gives other bits in another environment.

    The arms are made of the passes in the run's own environment; a repeat is compared with those and forgotten.
    """
    broken = []
    for role in case.factor.switch.roles if case.repeats else ():
        first = watched[role, Choice.REFERENCE].score
        repeats = {
            ", ".join(f"{name}={value}" for name, value in environment.items()): run.repeat(
                role, case.factor, environment
            )
            for environment in case.repeats
        }
        broken += [
            f"{shards} of {len(first.shards)} shards on {role.value} under {environment}"
            for environment, shards in repeats_differ(first, repeats).items()
        ]
    if not broken:
        return None
    reason = f"The reference claims the same bits in every topology and gives others: {'; '.join(broken)}."
    return Finding(diagnosis=Diagnosis.REFERENCE_ITSELF_IS_BROKEN, reason=reason)


def _replays(factor: MismatchFactor, run: ScoringRun) -> tuple[OperatorReplay, ...]:
    """What became of the operator alone; a failure is a sentence, since arms can be read without it."""
    try:
        return run.replay(factor)
    except RestoreError:
        raise
    except (RuntimeError, ValueError, TypeError) as error:
        reason = f"not played: {type(error).__name__}: {error}"
        return tuple(OperatorReplay(captured_on=role, reason=reason) for role in factor.switch.roles)


def _diagnose_references(
    replays: Sequence[OperatorReplay], weights: Mapping[PolicyRole, WeightsDigest]
) -> Finding | None:
    """What follows where two sides' references are apart on one set of operands, at any origin."""
    rollout, training = (weights[role].tensors for role in _ROLES)
    # Each side plays with its own weights: unless all are known to be the same, apart does not mean broken.
    same = rollout == training and not any(digest.startswith("unobservable") for digest in training.values())
    apart = disagreement(replays)
    return Finding(diagnosis=Diagnosis.REFERENCE_ITSELF_IS_BROKEN, reason=apart) if apart and same else None


def _passes(
    factor: MismatchFactor, run: ScoringRun, before: Mapping[PolicyRole, Watched], path: ExecutionPath
) -> dict[PassKey, Watched]:
    """Score what the factor's arms need besides the origin, each once; the other role is looked at while one is off."""
    watched = {
        (role, run.at_origin(factor) if role in factor.switch.roles else Choice.NATIVE): before[role] for role in _ROLES
    }
    if path is _DECODE:  # training has one path, and its passes may be there from the factor's prefill
        watched |= {key: one for key, one in run.seen.get(factor.id, {}).items() if key[0] is PolicyRole.TRAINING}
    for bound in factor.arms.values():
        for role, value in bound.items():
            if (role, value) not in watched:
                choices = {factor.id: value}
                watched[role, value] = run.decode(choices) if path is _DECODE else run.score(role, choices)
    run.seen[factor.id] = watched
    return watched


def _diagnose(
    factor: MismatchFactor, origin: Origin, arms: Mapping[str, ArmTokens], *, epsilon_low: float, epsilon_high: float
) -> Finding:
    if factor.expansion is Expansion.VALUE_SWEEP:
        return diagnose_sweep(arms, live=factor.live_arm, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
    if origin is Origin.ALIGNED:
        return diagnose_from_aligned(arms)
    return diagnose_from_native(arms, epsilon_low=epsilon_low, epsilon_high=epsilon_high)


def _refused(reason: str) -> tuple[Gate, ...]:
    # The other gates were never reached; "not measured" is not "ok".
    return tuple(
        Gate(
            name=name,
            ok=False,
            reason=reason if name is GateName.SWITCH_EFFECTIVE else "Not reached: nothing was bound.",
        )
        for name in GateName
    )
