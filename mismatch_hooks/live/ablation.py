"""Run one planned ablation on the two live engines, and prove afterwards that both are as they were."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mismatch_hooks.live.registry import Registry
from mismatch_hooks.pipeline.bind import BindingError, RestoreError
from mismatch_hooks.pipeline.diagnose import (
    Finding,
    blocked,
    diagnose_content,
    diagnose_from_aligned,
    diagnose_from_native,
    diagnose_sweep,
)
from mismatch_hooks.pipeline.metrics import from_lists, measure
from mismatch_hooks.pipeline.report import report
from mismatch_hooks.pipeline.score import ArmTokens, PassKey, read_arms, response_logprobs
from mismatch_hooks.pipeline.verify import verify, verify_content
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import (
    Choice,
    Diagnosis,
    ExecutionPath,
    Expansion,
    GateName,
    NoiseFloor,
    Origin,
    PolicyRole,
    SettingChannel,
    Value,
)
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.plan import Candidate, Plan
from mismatch_hooks.schema.score import Binding, Score, ScoringSequence, SwitchState, WeightsDigest
from mismatch_hooks.schema.shape import ModelShape
from mismatch_hooks.schema.verdict import ArmReading, Gate, Verdict

_ROLES = (PolicyRole.ROLLOUT, PolicyRole.TRAINING)


class NotRestoredError(RuntimeError):
    """After the arms, an engine does not score as before; the caller must not ablate again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedBatch:
    """What is re-scored, and what the live run said about the same tokens.

    Attributes:
        sequences: the sampled rollouts.
        rollout_logprobs: what vLLM returned while sampling, one list a sequence, nats.
        training_logprobs: what the loop's own forward gave, likewise.
        epsilon_low: the loop's clip range.
        epsilon_high: the loop's clip range.
        weights: what each side has loaded.
        differing_since: the step since which some tensor is known to differ, or None.
    """

    sequences: Sequence[ScoringSequence]
    rollout_logprobs: Sequence[Sequence[float | None]]
    training_logprobs: Sequence[Sequence[float]]
    epsilon_low: float
    epsilon_high: float
    weights: Mapping[PolicyRole, WeightsDigest]
    differing_since: int | None = None

    @property
    def tokens(self) -> int:
        """Active tokens."""
        return sum(sum(sequence.response_mask) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationResult:
    """Everything one ablation found.

    Attributes:
        verdicts: one per factor that was reached, in the order in which they ran.
        not_reached: ids of the planned factors for which no time was left, in order.
        paths: comparisons at the origin that need no factor, each from metric names to values: ``cross_framework``
            (training prefill against rollout prefill) and ``decode_against_prefill`` (rollout prefill against decode of
            the same tokens), whose sum is training against rollout. From native two more say whether the live values
            can be scored again at all: ``live_against_decode`` (decode against what was returned while sampling; absent
            where the engine cannot be made to decode given tokens, and then the live values stand for decode) and
            ``training_rescore`` (the scoring forward against the loop's own forward).
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
    pitfalls: Sequence[str],
    fingerprint: str,
    timeout_s: float,
    budget_s: float = math.inf,
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
        pitfalls: sentences of the guards that were tripped.
        fingerprint: of the execution.
        timeout_s: seconds for one pass.
        budget_s: seconds for all of it; a factor that could not be finished in time is not begun, except the first and
            those that need no pass.

    Raises:
        NotRestoredError: a pass after the arms is not, to the bit, the same pass before them.
        RestoreError: an attribute that was patched holds something that is not ours.
    """
    started = time.perf_counter()
    run = _Run(plan, batch, engines, registry, shape, timeout_s)
    verdicts: list[Verdict] = []
    not_reached: list[str] = []
    slowest = 0.0
    before = {role: run.score(role, {}) for role in _ROLES}
    proof_s = time.perf_counter() - started  # the same passes will be taken once more at the end
    try:
        decoded = run.decode()
        for case in plan.cases:
            begun = time.perf_counter()
            if slowest and case.factor.passes and begun - started + slowest + proof_s > budget_s:
                not_reached.append(case.factor.id)
                continue
            verdicts.append(_judge(case, run, before, noise_floor, pitfalls, fingerprint, plan.origin))
            if case.factor.passes:
                slowest = max(slowest, time.perf_counter() - begun)
    finally:
        _prove_restored(run, before)
    seconds = time.perf_counter() - started
    return AblationResult(
        verdicts=tuple(verdicts),
        not_reached=tuple(not_reached),
        paths=_paths({role: watched.score for role, watched in before.items()}, decoded, batch, plan.origin),
        passes=run.passes,
        seconds=seconds,
        least_seconds=seconds - sum(verdict.seconds for verdict in verdicts) + slowest,
        whole_seconds=seconds + len(not_reached) * slowest,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Watched:
    """One pass, and what the other role's switches read while it was bound."""

    score: Score
    other_side: tuple[SwitchState, ...]


class _Run:
    """The passes of one ablation, counted."""

    def __init__(
        self,
        plan: Plan,
        batch: CapturedBatch,
        engines: Mapping[PolicyRole, ScoringBackend],
        registry: Registry,
        shape: ModelShape,
        timeout_s: float,
    ) -> None:
        self.batch = batch
        self.passes = 0
        self._engines = engines
        self._timeout_s = timeout_s
        self._factors = [case.factor for case in plan.cases if case.factor.expansion is not Expansion.CONTENT]
        self._parameters = {case.factor.id: _parameters(case, registry, shape) for case in plan.cases}
        self._aligned = plan.origin is Origin.ALIGNED
        # One factor that does not fit a live model must not keep the others from being bound together.
        self.refused = {factor.id: why for factor in self._factors if (why := self._refusal(factor))}
        self._factors = [factor for factor in self._factors if factor.id not in self.refused]

    def at_origin(self, factor: MismatchFactor) -> Value:
        """What a factor is bound to while another one is examined."""
        return Choice.REFERENCE if self._aligned and factor.references else Choice.NATIVE

    def score(self, role: PolicyRole, choices: Mapping[str, Value]) -> _Watched:
        """Score one role with every factor at the origin but for ``choices``, and look at the other role meanwhile."""
        other = PolicyRole.TRAINING if role is PolicyRole.ROLLOUT else PolicyRole.ROLLOUT
        engine = self._engines[role]
        with engine.bind(self._binding(role, {**self._at_origin(role), **choices})):
            self.passes += 1
            score = engine.score(self.batch.sequences, timeout_s=self._timeout_s)
            native = self._binding(other, dict.fromkeys(self._at_origin(other), Choice.NATIVE))
            return _Watched(score=score, other_side=self._engines[other].switch_states(native))

    def decode(self) -> Score | None:
        """Let the rollout engine decode the captured tokens at the origin, if it can be made to."""
        engine = self._engines[PolicyRole.ROLLOUT]
        if ExecutionPath.ROLLOUT_DECODE not in engine.paths:
            return None
        with engine.bind(self._binding(PolicyRole.ROLLOUT, self._at_origin(PolicyRole.ROLLOUT))):
            self.passes += 1
            return engine.score(self.batch.sequences, path=ExecutionPath.ROLLOUT_DECODE, timeout_s=self._timeout_s)

    def _refusal(self, factor: MismatchFactor) -> str:
        try:
            for role in factor.switch.roles:
                self._engines[role].switch_states(self._binding(role, {factor.id: Choice.NATIVE}))
        except BindingError as refused:
            return str(refused)
        return ""

    def _at_origin(self, role: PolicyRole) -> dict[str, Value]:
        return {factor.id: self.at_origin(factor) for factor in self._factors if role in factor.switch.roles}

    def _binding(self, role: PolicyRole, choices: Mapping[str, Value]) -> Binding:
        return Binding(role=role, choices=choices, parameters={factor: self._parameters[factor] for factor in choices})


def _parameters(case: Candidate, registry: Registry, shape: ModelShape) -> Mapping[str, object]:
    if case.factor.switch.channel is SettingChannel.SCORING_PASS or case.factor.expansion is Expansion.CONTENT:
        return {}
    chosen = registry.adapter(case.factor.id).parameters(case.factor.id, shape)
    return {**chosen, "implementation": case.reference.name} if case.reference else chosen


def _judge(
    case: Candidate,
    run: _Run,
    before: Mapping[PolicyRole, _Watched],
    noise_floor: NoiseFloor,
    pitfalls: Sequence[str],
    fingerprint: str,
    origin: Origin,
) -> Verdict:
    started, passes_before = time.perf_counter(), run.passes
    batch, factor = run.batch, case.factor
    readings: tuple[ArmReading, ...] = ()
    try:
        if factor.expansion is Expansion.CONTENT:
            rollout, training = (batch.weights[role] for role in _ROLES)
            gates = verify_content(rollout, training)
            finding = blocked(gates) or diagnose_content(rollout, training, differing_since=batch.differing_since)
        elif factor.id in run.refused:
            raise BindingError(run.refused[factor.id])
        else:
            passes, other_side = _passes(factor, run, before)
            gates = verify(factor, passes, other_side, batch.sequences, pitfalls)
            read = blocked(gates)
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
        path=ExecutionPath.ROLLOUT_FULL_PREFILL,
        tokens=batch.tokens,
        passes=(2 if factor.passes else 0) + run.passes - passes_before,
        seconds=time.perf_counter() - started,
        fingerprint=fingerprint,
    )


def _passes(
    factor: MismatchFactor, run: _Run, before: Mapping[PolicyRole, _Watched]
) -> tuple[dict[PassKey, Score], dict[PolicyRole, tuple[SwitchState, ...]]]:
    """Score what the factor's arms need besides the origin, each once; the other role is looked at while one is off."""
    watched = {
        (role, run.at_origin(factor) if role in factor.switch.roles else Choice.NATIVE): before[role] for role in _ROLES
    }
    for bound in factor.arms.values():
        for role, value in bound.items():
            if (role, value) not in watched:
                watched[role, value] = run.score(role, {factor.id: value})
    other_side = {role: one.other_side for (role, value), one in watched.items() if value is not Choice.NATIVE}
    return {key: one.score for key, one in watched.items()}, other_side


def _diagnose(
    factor: MismatchFactor, origin: Origin, arms: Mapping[str, ArmTokens], *, epsilon_low: float, epsilon_high: float
) -> Finding:
    if factor.expansion is Expansion.VALUE_SWEEP:
        return diagnose_sweep(arms, epsilon_low=epsilon_low, epsilon_high=epsilon_high)
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


def _prove_restored(run: _Run, before: Mapping[PolicyRole, _Watched]) -> None:
    for role in _ROLES:
        after = run.score(role, {})
        if after.score.shards != before[role].score.shards:
            raise NotRestoredError(
                f"the {role.value} engine's log-probs after the arms differ from those before; either it is "
                "not deterministic or a binding was left behind, so ablation is off for the rest of this run."
            )


def _paths(
    before: Mapping[PolicyRole, Score], decoded: Score | None, batch: CapturedBatch, origin: Origin
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
    paths = {"cross_framework": compared(training, prefill)}
    if decoded is not None:
        decode = response_logprobs(decoded, batch.sequences)
        paths["decode_against_prefill"] = compared(prefill, decode)
    if origin is Origin.ALIGNED:
        return paths  # the live values are native, so comparing them with aligned ones would bridge nothing
    if decoded is None:
        paths["decode_against_prefill"] = compared(prefill, live)
    else:
        paths["live_against_decode"] = compared(decode, live)
    return paths | {"training_rescore": compared(training, batch.training_logprobs)}


__all__ = ["AblationResult", "CapturedBatch", "NotRestoredError", "RestoreError", "ablate"]
