"""Run one planned ablation on the two live engines, and prove afterwards that both are as they were."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from mismatch_hooks.live.judging import as_the_run_is, judge
from mismatch_hooks.live.pairs import with_pairs
from mismatch_hooks.live.passes import CONVENTION, CapturedBatch, ScoringRun, Watched
from mismatch_hooks.live.registry import Registry
from mismatch_hooks.live.temperature_fit import temperature_sentences
from mismatch_hooks.pipeline.metrics import from_lists, measure
from mismatch_hooks.pipeline.score import response_logprobs
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import (
    Diagnosis,
    ExecutionPath,
    Expansion,
    NoiseFloor,
    Origin,
    PolicyRole,
)
from mismatch_hooks.schema.environment import ExecutionFingerprint
from mismatch_hooks.schema.freeze import FrozenMapping
from mismatch_hooks.schema.plan import Candidate, Plan
from mismatch_hooks.schema.score import Binding, Score
from mismatch_hooks.schema.shape import ModelShape
from mismatch_hooks.schema.verdict import Verdict

_ROLES = (PolicyRole.ROLLOUT, PolicyRole.TRAINING)
# Ends the id of a factor whose verdict with rollout decoding was not reached.
WHILE_DECODING = " (rollout decodes)"
_PREFILL, _DECODE = ExecutionPath.ROLLOUT_FULL_PREFILL, ExecutionPath.ROLLOUT_DECODE


class NotRestoredError(RuntimeError):
    """After the arms, an engine does not score as before; the caller must not ablate again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationResult:
    """Everything one ablation found.

    Attributes:
        verdicts: one per factor that was reached, in the order in which they ran; where the live run decodes to other
            log-probs than it prefills, those with four arms a second time, with the rollout side's arms decoded.
        not_reached: ids of the planned factors for which no time was left, in order; those that would have been judged
            a second time end in ``WHILE_DECODING``.
        paths: comparisons at the origin that need no factor, each from metric names to values: ``cross_framework``
            (training prefill against rollout prefill) and ``decode_against_prefill`` (rollout prefill against decode of
            the same tokens), whose sum is training against rollout. Where the origin is not what the run has,
            ``live_against_prefill`` is the second of them as the run has it (prefill with the run's own operators
            against what was returned while sampling); where it is, ``live_against_decode`` says whether the live values
            can be decoded again (absent where the engine cannot be made to decode given tokens, and then the live
            values stand for decode). ``training_rescore`` is the run's own scoring forward against the loop's.
        passes: scoring passes spent, the restoration proof included.
        seconds: wall time.
        least_seconds: what the same would have taken for its slowest factor alone.
        whole_seconds: what it would have taken with those not reached, each as slow as the slowest one.
    """

    verdicts: tuple[Verdict, ...]
    not_reached: tuple[str, ...]
    paths: Mapping[str, Mapping[str, float]]
    passes: int
    seconds: float
    least_seconds: float
    whole_seconds: float


def ablate(
    plan: Plan,
    batch: CapturedBatch,
    *,
    engines: Mapping[PolicyRole, ScoringBackend],
    registry: Registry,
    shape: ModelShape,
    noise_floor: NoiseFloor,
    pitfalls: Callable[[Sequence[Sequence[float]]], Sequence[str]],
    notes: Sequence[str] = (),
    execution: ExecutionFingerprint,
    timeout_s: float,
    budget_s: float = math.inf,
    live: Mapping[PolicyRole, Binding] = FrozenMapping(),
) -> AblationResult:
    """Score the origin once a role, what each factor adds to it, and the origin once more.

    The last two passes prove two things at once: that the engines are deterministic, and that they are restored.

    Args:
        plan: what to examine, in order, and the origin.
        batch: what is re-scored.
        engines: both sides.
        registry: where the factors' adapters are.
        shape: parameters of the references.
        noise_floor: how noisy the run is.
        pitfalls: from the trainer's own re-score of the batch, one list a sequence, to the sentences of the guards that
            were tripped.
        notes: sentences that a reader of the verdicts should know.
        execution: what was read around the passes; its digest is every verdict's fingerprint.
        timeout_s: seconds for one pass.
        budget_s: seconds for all of it; a factor that could not be finished in time is not begun, except the first and
            those that need no pass.
        live: what the run keeps on its references; nothing of it is bound while this runs.

    Raises:
        NotRestoredError: a pass after the arms is not, to the bit, the same pass before them, or weights were written.
        RestoreError: an attribute that was patched holds something that is not ours.
    """
    started = time.perf_counter()
    run = ScoringRun(plan, batch, engines, registry, shape, timeout_s, live)
    notes = (*notes, *_unbound(plan, run))
    verdicts: list[Verdict] = []
    not_reached: list[str] = []
    coupled: list[Candidate] = []
    slowest = 0.0
    writes = {role: engines[role].mutation_count() for role in _ROLES}
    before = {role: run.score(role, {}) for role in _ROLES}
    proof_s = time.perf_counter() - started  # the same passes will be taken once more at the end
    try:
        decoded = run.decode({}) if run.can_decode else None
        at_origin = {role: watched.score for role, watched in before.items()}
        # At a native origin of a run that aligns nothing, the origin is the run.
        as_live = None if plan.origin is Origin.NATIVE and not live else {role: run.as_live(role) for role in _ROLES}
        paths = _paths(at_origin, decoded, as_live, batch)
        temperatures = _temperatures(run, paths)
        trapped = tuple(pitfalls(response_logprobs((as_live or at_origin)[PolicyRole.TRAINING], batch.sequences)))
        for case, path in _cases(plan, paths, decoded):
            begun = time.perf_counter()
            if slowest and case.factor.passes and begun - started + slowest + proof_s > budget_s:
                not_reached.append(case.factor.id if path is _PREFILL else case.factor.id + WHILE_DECODING)
                continue
            first = before if decoded is None or path is not _DECODE else {**before, PolicyRole.ROLLOUT: decoded}
            # A temperature on one side blocks every factor but the one that measures just that.
            traps, said = ((), temperatures) if case.factor.id == CONVENTION else (temperatures, ())
            told = (*trapped, *traps), (*notes, *said)
            verdict = judge(case, run, first, noise_floor, *told, execution, plan.origin, path)
            if plan.origin is Origin.ALIGNED and case.factor.live_arm is not None:
                verdict = as_the_run_is(verdict, case.factor, run, as_live or at_origin, paths)
            verdicts.append(verdict)
            if verdict.diagnosis is Diagnosis.COUPLED_WITH_OTHER_FACTORS:
                coupled.append(case)
            if case.factor.passes:
                slowest = max(slowest, time.perf_counter() - begun)
        for case in coupled:
            index = next(i for i, one in enumerate(verdicts) if one.factor == case.factor.id and one.path is _PREFILL)
            left_s = budget_s - (time.perf_counter() - started) - proof_s
            verdicts[index] = with_pairs(verdicts[index], case.factor, plan, run, before, left_s=left_s)
    finally:
        _prove_restored(run, before)
        _prove_unwritten(engines, writes)
    seconds = time.perf_counter() - started
    return AblationResult(
        verdicts=tuple(verdicts),
        not_reached=tuple(not_reached),
        paths=paths,
        passes=run.passes,
        seconds=seconds,
        least_seconds=seconds - sum(verdict.seconds for verdict in verdicts) + slowest,
        whole_seconds=seconds + len(not_reached) * slowest,
    )


def _unbound(plan: Plan, run: ScoringRun) -> tuple[str, ...]:
    refused = [case.factor.id for case in plan.background if case.factor.id in run.refused]
    return tuple(f"{factor} is not on its reference at the origin: {run.refused[factor]}" for factor in refused)


def _temperatures(run: ScoringRun, paths: Mapping[str, Mapping[str, float]]) -> tuple[str, ...]:
    batch = run.batch

    def score_at(temperature: float) -> list[list[float]]:
        return response_logprobs(run.divided(temperature), batch.sequences)

    captured = {PolicyRole.TRAINING: batch.training_logprobs, PolicyRole.ROLLOUT: batch.rollout_logprobs}
    masks = [sequence.response_mask for sequence in batch.sequences]
    return temperature_sentences(paths, captured, masks, score_at if run.can_divide else None)


def _cases(
    plan: Plan, paths: Mapping[str, Mapping[str, float]], decoded: Watched | None
) -> list[tuple[Candidate, ExecutionPath]]:
    """What is judged, in order: each factor by prefill, then, where the live run decodes otherwise, by decode."""
    cases = [(case, _PREFILL) for case in plan.cases]
    if decoded is None:
        return cases
    decode = paths["decode_against_prefill" if plan.origin is Origin.NATIVE else "live_against_prefill"]
    if plan.origin is Origin.ALIGNED:
        examined = decode["bitwise_fraction"] < 1.0
    else:
        # At a noisy floor the decode term is noise as well, and says nothing while it is the smaller one.
        examined = decode["dlogp_mean"] > paths["cross_framework"]["dlogp_mean"]
    four_arms = [case for case in plan.cases if case.factor.expansion is Expansion.STANDARD_FOUR]
    return cases + [(case, _DECODE) for case in four_arms if examined]


def _prove_restored(run: ScoringRun, before: Mapping[PolicyRole, Watched]) -> None:
    for role in _ROLES:
        after = run.score(role, {})
        if after.score.shards != before[role].score.shards:
            raise NotRestoredError(
                f"the {role.value} engine's log-probs after the arms differ from those before; either it is "
                "not deterministic or a binding was left behind, so ablation is off for the rest of this run."
            )


def _prove_unwritten(engines: Mapping[PolicyRole, ScoringBackend], before: Mapping[PolicyRole, int]) -> None:
    # A write need not show in the log-probs of this batch.
    for role, count in before.items():
        written = engines[role].mutation_count() - count
        if written:
            raise NotRestoredError(
                f"the {role.value} engine's weights were written {written} times while the arms were scored, and "
                "scoring only reads; ablation is off for the rest of this run."
            )


def _paths(
    before: Mapping[PolicyRole, Score],
    decoded: Watched | None,
    as_live: Mapping[PolicyRole, Score] | None,
    batch: CapturedBatch,
) -> dict[str, dict[str, float]]:
    prefill = response_logprobs(before[PolicyRole.ROLLOUT], batch.sequences)
    training = response_logprobs(before[PolicyRole.TRAINING], batch.sequences)
    masks = [sequence.response_mask for sequence in batch.sequences]

    def compared(
        minuend: Sequence[Sequence[float | None]], subtrahend: Sequence[Sequence[float | None]]
    ) -> dict[str, float]:
        state = measure(
            *from_lists(minuend, subtrahend, masks), epsilon_low=batch.epsilon_low, epsilon_high=batch.epsilon_high
        )
        return dict(state.finalize())

    live = batch.rollout_logprobs
    rescored = response_logprobs((as_live or before)[PolicyRole.TRAINING], batch.sequences)
    paths = {"cross_framework": compared(training, prefill)}
    if decoded is not None:
        decode = response_logprobs(decoded.score, batch.sequences)
        paths["decode_against_prefill"] = compared(prefill, decode)
    if as_live is not None:
        # The live values are of the run's own operators, and only a pass with those can bridge to them.
        live_prefill = response_logprobs(as_live[PolicyRole.ROLLOUT], batch.sequences)
        return paths | {
            "live_against_prefill": compared(live_prefill, live),
            "training_rescore": compared(rescored, batch.training_logprobs),
        }
    if decoded is None:
        paths["decode_against_prefill"] = compared(prefill, live)
    else:
        paths["live_against_decode"] = compared(decode, live)
    return paths | {"training_rescore": compared(rescored, batch.training_logprobs)}
