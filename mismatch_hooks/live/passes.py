"""The passes of one ablation: what is bound around each, what they gave, and how many there were."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mismatch_hooks.live.registry import Registry
from mismatch_hooks.live.replay import replay_operator
from mismatch_hooks.pipeline.bind import BindingError
from mismatch_hooks.pipeline.score import PassKey
from mismatch_hooks.schema.backend import ScoringBackend
from mismatch_hooks.schema.enums import (
    Choice,
    ExecutionPath,
    Expansion,
    Origin,
    PolicyRole,
    RebindCost,
    SettingChannel,
    Value,
)
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.freeze import FrozenMapping
from mismatch_hooks.schema.plan import Candidate, Plan
from mismatch_hooks.schema.replay import OperatorReplay
from mismatch_hooks.schema.score import Binding, Score, ScoringSequence, SwitchState, WeightsDigest
from mismatch_hooks.schema.shape import ModelShape

# The built-in sweep whose value "processed" divides each row's logits by its temperature.
CONVENTION = "logprob.convention"


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
class Watched:
    """One pass, and what was seen around it.

    Attributes:
        score: what the pass gave.
        other_side: what the other role's switches read while it was bound.
    """

    score: Score
    other_side: tuple[SwitchState, ...]


class ScoringRun:
    """The passes of one ablation, counted."""

    def __init__(
        self,
        plan: Plan,
        batch: CapturedBatch,
        engines: Mapping[PolicyRole, ScoringBackend],
        registry: Registry,
        shape: ModelShape,
        timeout_s: float,
        live: Mapping[PolicyRole, Binding] = FrozenMapping(),
    ) -> None:
        self.batch = batch
        self._live = live
        self.passes = 0
        self.seen: dict[str, dict[PassKey, Watched]] = {}
        self._engines = engines
        self._registry = registry
        self._timeout_s = timeout_s
        scored = [case for case in (*plan.cases, *plan.background) if case.factor.expansion is not Expansion.CONTENT]
        self._factors = [case.factor for case in scored]
        self._parameters = {case.factor.id: _parameters(case, registry, shape) for case in scored}
        self._aligned = plan.origin is Origin.ALIGNED
        # One factor that does not fit a live model must not keep the others from being bound together.
        self.refused = {factor.id: why for factor in self._factors if (why := self._refusal(factor))}
        self._factors = [factor for factor in self._factors if factor.id not in self.refused]

    def at_origin(self, factor: MismatchFactor) -> Value:
        """What a factor is bound to while another one is examined."""
        return Choice.REFERENCE if self._aligned and factor.references else Choice.NATIVE

    def score(self, role: PolicyRole, choices: Mapping[str, Value], path: ExecutionPath | None = None) -> Watched:
        """Score one role with every factor at the origin but for ``choices``, and look at the other role meanwhile."""
        other = PolicyRole.TRAINING if role is PolicyRole.ROLLOUT else PolicyRole.ROLLOUT
        engine = self._engines[role]
        with engine.bind(self._binding(role, {**self._at_origin(role), **choices})):
            self.passes += 1
            score = engine.score(self.batch.sequences, path=path, timeout_s=self._timeout_s)
            native = self._binding(other, dict.fromkeys(self._at_origin(other), Choice.NATIVE))
            return Watched(score=score, other_side=self._engines[other].switch_states(native))

    def decode(self, choices: Mapping[str, Value]) -> Watched:
        """Let the rollout engine decode the captured tokens; only where ``can_decode``."""
        return self.score(PolicyRole.ROLLOUT, choices, ExecutionPath.ROLLOUT_DECODE)

    @property
    def can_decode(self) -> bool:
        """Whether the rollout engine can be made to decode given tokens."""
        return ExecutionPath.ROLLOUT_DECODE in self._engines[PolicyRole.ROLLOUT].paths

    def as_live(self, role: PolicyRole, choices: Mapping[str, Value] | None = None) -> Score:
        """Score the captured tokens on one engine as the live run has it, but for ``choices``; by prefill without any.

        That is native, but for what the run keeps on its reference.
        """
        return self.score(role, {**self._choices_of_run(role), **(choices or {})}).score

    def repeat(self, role: PolicyRole, factor: MismatchFactor, environment: Mapping[str, str]) -> Score:
        """Score one role again with ``factor`` on its reference, built and run with ``environment`` in force."""
        binding = self._binding(role, {**self._at_origin(role), factor.id: Choice.REFERENCE})
        told = {**binding.parameters[factor.id], "repeated_under": environment}
        binding = replace(binding, environment=environment, parameters={**binding.parameters, factor.id: told})
        with self._engines[role].bind(binding):
            self.passes += 1
            return self._engines[role].score(self.batch.sequences, timeout_s=self._timeout_s)

    def replay(self, factor: MismatchFactor) -> tuple[OperatorReplay, ...]:
        """Play the calls of the factor's operator alone, in one short native forward a role, which is no pass."""
        bindings = {role: self._binding(role, {factor.id: Choice.NATIVE}) for role in factor.switch.roles}
        return replay_operator(self._engines, bindings, self.batch.sequences, timeout_s=self._timeout_s)

    @property
    def can_divide(self) -> bool:
        """Whether the trainer can be made to score with its logits divided by a temperature."""
        factor = self._registry.factors.get(CONVENTION)
        capabilities = self._engines[PolicyRole.TRAINING].capabilities
        return factor is not None and capabilities.get(factor.switch.path) is RebindCost.PER_REQUEST

    def divided(self, temperature: float) -> Score:
        """Score on the live run's trainer with its logits divided by ``temperature``; only where ``can_divide``."""
        role = PolicyRole.TRAINING
        choices: dict[str, Value] = {**self._choices_of_run(role), CONVENTION: "processed"}
        sequences = [replace(sequence, temperature=temperature) for sequence in self.batch.sequences]
        with self._engines[role].bind(self._binding(role, choices)):
            self.passes += 1
            return self._engines[role].score(sequences, timeout_s=self._timeout_s)

    def _refusal(self, factor: MismatchFactor) -> str:
        try:
            for role in factor.switch.roles:
                self._engines[role].switch_states(self._binding(role, {factor.id: Choice.NATIVE}))
        except BindingError as refused:
            return str(refused)
        return ""

    def _at_origin(self, role: PolicyRole) -> dict[str, Value]:
        return {factor.id: self.at_origin(factor) for factor in self._factors if role in factor.switch.roles}

    def _choices_of_run(self, role: PolicyRole) -> dict[str, Value]:
        held = self._live[role].choices if role in self._live else {}
        return {**dict.fromkeys(self._at_origin(role), Choice.NATIVE), **held}

    def _binding(self, role: PolicyRole, choices: Mapping[str, Value]) -> Binding:
        known = {**(self._live[role].parameters if role in self._live else {}), **self._parameters}
        return Binding(role=role, choices=choices, parameters={factor: known.get(factor, {}) for factor in choices})


def _parameters(case: Candidate, registry: Registry, shape: ModelShape) -> Mapping[str, object]:
    if case.factor.switch.channel is SettingChannel.SCORING_PASS:
        return {}
    chosen = registry.adapter(case.factor.id).parameters(case.factor.id, shape)
    return {**chosen, "implementation": case.reference.name} if case.reference else chosen
