"""What an ablation concludes: gates first, then arms, then one diagnosis with its evidence."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from mismatch_hooks.schema.contract import ComparisonIssue
from mismatch_hooks.schema.enums import Diagnosis, ExecutionPath, GateName, NoiseFloor, Origin
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError
from mismatch_hooks.schema.replay import OperatorReplay


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """One precondition, evaluated.

    Attributes:
        name: which.
        ok: True when it holds.
        reason: one sentence; what was found when it holds, what to change when it does not.
    """

    name: GateName
    ok: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmReading:
    """The metrics of one arm on the captured tokens.

    Attributes:
        arm: an ``Arm``, or ``"native"`` and ``"<role>=<value>"`` of a sweep.
        metrics: names of ``pipeline.metric_table.METRICS`` to values.
    """

    arm: str
    metrics: Mapping[str, float]

    def __post_init__(self) -> None:
        object.__setattr__(self, "metrics", FrozenMapping(self.metrics))


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedEffect:
    """What one arm changes against the arm in which both sides are native, token by token on the same tokens.

    Attributes:
        arm: the arm compared.
        tokens: active tokens compared.
        sequences: clusters that the interval is built on.
        dlogp_change: mean over tokens of |dlogp| in the arm minus |dlogp| natively; negative is less mismatch.
        interval: confidence interval of ``dlogp_change``, clustered by sequence.
        p_value: two-sided exact sign-flip test over sequences.
        clip_events_removed: tokens outside the clip range natively and inside it in the arm.
        clip_events_added: tokens inside the clip range natively and outside it in the arm.
        clip_p_value: exact McNemar test on those two counts, which takes tokens as independent.
        clip_clustered_p_value: the sign-flip test on those events, clustered by sequence; the one that decides.
        resolvable: smallest |dlogp_change| that these tokens resolve at the verdict's level with power 0.8.
        tokens_needed: tokens that would resolve a change of a tenth of the native mismatch; None if not known.
        bits_changed: tokens whose log-prob differs in any bit on either side.
    """

    arm: str
    tokens: int
    sequences: int
    dlogp_change: float
    interval: tuple[float, float]
    p_value: float
    clip_events_removed: int
    clip_events_added: int
    clip_p_value: float
    clip_clustered_p_value: float
    resolvable: float
    tokens_needed: int | None
    bits_changed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer for one factor from one origin on one captured batch.

    Attributes:
        factor: factor id.
        origin: what the other factors were bound to.
        noise_floor: how noisy the run is.
        path: the rollout path that was scored.
        diagnosis: the answer.
        reason: one or two sentences a person can act on.
        recommendation: what to do; empty when nothing follows.
        gates: all four, in order.
        arms: the arms that were read; empty when a gate blocked.
        effects: one per arm that is not all native; empty when a gate blocked.
        issues: fields of the two sides' contracts of this operator that break their comparison rule.
        replays: the operator alone, on operands that each side's live forward gave; empty where no arms were judged,
            and for factors that swap no operator.
        tokens: active tokens scored.
        passes: scoring passes spent, repeats included.
        seconds: wall time spent.
        fingerprint: of the execution (identity, settings, weights, thresholds).
    """

    factor: str
    origin: Origin
    noise_floor: NoiseFloor
    path: ExecutionPath
    diagnosis: Diagnosis
    reason: str
    recommendation: str = ""
    gates: tuple[Gate, ...]
    arms: tuple[ArmReading, ...] = ()
    effects: tuple[PairedEffect, ...] = field(default=())
    issues: tuple[ComparisonIssue, ...] = ()
    replays: tuple[OperatorReplay, ...] = ()
    tokens: int
    passes: int
    seconds: float
    fingerprint: str

    def __post_init__(self) -> None:
        names = [gate.name for gate in self.gates]
        if names != list(GateName):
            raise SchemaError(f"{self.factor}: a verdict carries all {len(GateName)} gates in order; got {names}.")
        if self.diagnosis.judged and not all(gate.ok for gate in self.gates):
            failed = ", ".join(gate.name.value for gate in self.gates if not gate.ok)
            raise SchemaError(f"{self.factor}: {self.diagnosis.value} cannot be published while {failed} failed.")
