"""Run one planned ablation on the two live engines, and prove afterwards that both are as they were."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mismatch_hooks.live.registry import Registry
from mismatch_hooks.pipeline.bind import BindingError, RestoreError
from mismatch_hooks.pipeline.diagnose import Finding, blocked, diagnose_from_native
from mismatch_hooks.pipeline.metrics import from_lists, measure
from mismatch_hooks.pipeline.report import report
from mismatch_hooks.pipeline.score import PassKey, read_arms, response_logprobs
from mismatch_hooks.pipeline.verify import verify
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import Choice, Diagnosis, ExecutionPath, GateName, NoiseFloor, PolicyRole
from mismatch_hooks.schema.plan import Candidate, Plan
from mismatch_hooks.schema.score import Binding, Score, ScoringSequence, SwitchState
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
    """

    sequences: Sequence[ScoringSequence]
    rollout_logprobs: Sequence[Sequence[float | None]]
    training_logprobs: Sequence[Sequence[float]]
    epsilon_low: float
    epsilon_high: float

    @property
    def tokens(self) -> int:
        """Active tokens."""
        return sum(sum(sequence.response_mask) for sequence in self.sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class AblationResult:
    """Everything one ablation found.

    Attributes:
        verdicts: one per planned factor, in the order in which they ran.
        paths: comparisons that need no factor: ``cross_framework`` (training prefill against rollout prefill),
            ``decode_against_prefill`` (rollout prefill against what was returned while sampling), and
            ``training_rescore`` (the scoring forward against the loop's own forward); metric names to values.
        passes: scoring passes spent, the restoration proof included.
        seconds: wall time.
    """

    verdicts: tuple[Verdict, ...]
    paths: Mapping[str, Mapping[str, float]]
    passes: int
    seconds: float


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
) -> AblationResult:
    """Score native once a role, each factor's reference once a role, and native once more.

    The last two passes prove two things at once: that the engines are deterministic, and that they are restored.

    Raises:
        NotRestoredError: a native pass after the arms is not, to the bit, the native pass before them.
        RestoreError: an attribute that was patched holds something that is not ours.
    """
    started = time.perf_counter()
    run = _Run(plan, batch, engines, registry, shape, timeout_s)
    native = {role: run.score(role, {}) for role in _ROLES}
    verdicts = []
    try:
        for case in plan.cases:
            verdicts.append(_judge(case, run, native, noise_floor, pitfalls, fingerprint, plan))
    finally:
        _prove_restored(run, native)
    return AblationResult(
        verdicts=tuple(verdicts),
        paths=_paths(native, batch),
        passes=run.passes,
        seconds=time.perf_counter() - started,
    )


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
        self._native = {case.factor.id: Choice.NATIVE for case in plan.cases}
        self._parameters = {case.factor.id: _parameters(case, registry, shape) for case in plan.cases}

    def binding(self, role: PolicyRole, choices: Mapping[str, Choice]) -> Binding:
        return Binding(role=role, choices={**self._native, **choices}, parameters=self._parameters)

    def score(self, role: PolicyRole, choices: Mapping[str, Choice]) -> Score:
        engine = self._engines[role]
        with engine.bind(self.binding(role, choices)):
            self.passes += 1
            return engine.score(self.batch.sequences, timeout_s=self._timeout_s)

    def score_and_watch(self, role: PolicyRole, factor: str) -> tuple[Score, tuple[SwitchState, ...]]:
        """Score the reference on one role, and read the other role's switches while it is bound."""
        other = PolicyRole.TRAINING if role is PolicyRole.ROLLOUT else PolicyRole.ROLLOUT
        engine = self._engines[role]
        with engine.bind(self.binding(role, {factor: Choice.REFERENCE})):
            self.passes += 1
            score = engine.score(self.batch.sequences, timeout_s=self._timeout_s)
            return score, self._engines[other].switch_states(self.binding(other, {}))


def _parameters(case: Candidate, registry: Registry, shape: ModelShape) -> Mapping[str, object]:
    assert case.reference is not None, "a planned case has a reference"
    chosen = registry.adapter(case.factor.id).parameters(case.factor.id, shape)
    return {**chosen, "implementation": case.reference.name}


def _judge(
    case: Candidate,
    run: _Run,
    native: Mapping[PolicyRole, Score],
    noise_floor: NoiseFloor,
    pitfalls: Sequence[str],
    fingerprint: str,
    plan: Plan,
) -> Verdict:
    started, passes_before = time.perf_counter(), run.passes
    passes: dict[PassKey, Score] = {(role, Choice.NATIVE): native[role] for role in _ROLES}
    other_side: dict[PolicyRole, tuple[SwitchState, ...]] = {}
    readings: tuple[ArmReading, ...] = ()
    try:
        for role in _ROLES:
            passes[role, Choice.REFERENCE], other_side[role] = run.score_and_watch(role, case.factor.id)
        gates = verify(case.factor, passes, other_side, run.batch.sequences, pitfalls)
        finding = blocked(gates)
        if finding is None:
            epsilons = {"epsilon_low": run.batch.epsilon_low, "epsilon_high": run.batch.epsilon_high}
            arms, readings = read_arms(passes, run.batch.sequences, **epsilons)
            finding = diagnose_from_native(arms, **epsilons)
    except BindingError as refused:
        gates = _refused(str(refused))
        finding = Finding(diagnosis=Diagnosis.VARIANT_DID_NOT_APPLY, reason=str(refused))
    return report(
        case.factor,
        finding,
        gates=gates,
        arms=readings,
        origin=plan.origin,
        noise_floor=noise_floor,
        path=ExecutionPath.ROLLOUT_FULL_PREFILL,
        tokens=run.batch.tokens,
        passes=2 + run.passes - passes_before,
        seconds=time.perf_counter() - started,
        fingerprint=fingerprint,
    )


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


def _prove_restored(run: _Run, before: Mapping[PolicyRole, Score]) -> None:
    for role in _ROLES:
        after = run.score(role, {})
        if after.shards != before[role].shards:
            raise NotRestoredError(
                f"the {role.value} engine's native log-probs after the arms differ from those before; either it is "
                "not deterministic or a binding was left behind, so ablation is off for the rest of this run."
            )


def _paths(native: Mapping[PolicyRole, Score], batch: CapturedBatch) -> dict[str, dict[str, float]]:
    prefill = response_logprobs(native[PolicyRole.ROLLOUT], batch.sequences)
    training = response_logprobs(native[PolicyRole.TRAINING], batch.sequences)
    masks = [sequence.response_mask for sequence in batch.sequences]

    def compared(
        minuend: Sequence[Sequence[float | None]], subtrahend: Sequence[Sequence[float | None]]
    ) -> dict[str, float]:
        state = measure(
            *from_lists(minuend, subtrahend, masks), epsilon_low=batch.epsilon_low, epsilon_high=batch.epsilon_high
        )
        return dict(state.finalize())

    return {
        "cross_framework": compared(training, prefill),
        "decode_against_prefill": compared(prefill, batch.rollout_logprobs),
        "training_rescore": compared(training, batch.training_logprobs),
    }


__all__ = ["AblationResult", "CapturedBatch", "NotRestoredError", "RestoreError", "ablate"]
