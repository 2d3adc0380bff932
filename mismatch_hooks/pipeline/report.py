"""Put one factor's gates, arms and finding together into the verdict that is published."""

from collections.abc import Sequence

from mismatch_hooks.pipeline.diagnose import Finding
from mismatch_hooks.schema.contract import ComparisonIssue
from mismatch_hooks.schema.enums import Diagnosis, ExecutionPath, NoiseFloor, Origin
from mismatch_hooks.schema.factor import MismatchFactor
from mismatch_hooks.schema.replay import OperatorReplay
from mismatch_hooks.schema.verdict import ArmReading, Gate, Verdict

_SIDES = {
    Diagnosis.CAUSED_BY_ROLLOUT_SIDE: "rollout",
    Diagnosis.CAUSED_BY_TRAINING_SIDE: "training",
    Diagnosis.CAUSED_BY_BOTH_SIDES: "rollout and the training",
}


def report(
    factor: MismatchFactor,
    finding: Finding,
    *,
    gates: Sequence[Gate],
    arms: Sequence[ArmReading],
    origin: Origin,
    noise_floor: NoiseFloor,
    path: ExecutionPath,
    tokens: int,
    passes: int,
    seconds: float,
    fingerprint: str,
    issues: Sequence[ComparisonIssue] = (),
    replays: Sequence[OperatorReplay] = (),
) -> Verdict:
    """Return the verdict; arms and effects are left out of one that a gate blocked, so that nobody reads them."""
    readable = all(gate.ok for gate in gates)
    return Verdict(
        factor=factor.id,
        origin=origin,
        noise_floor=noise_floor,
        path=path,
        diagnosis=finding.diagnosis,
        reason=finding.reason,
        recommendation=recommend(factor, finding, readable=readable),
        gates=tuple(gates),
        arms=tuple(arms) if readable else (),
        effects=finding.effects if readable else (),
        issues=tuple(issues),
        replays=tuple(replays),
        tokens=tokens,
        passes=passes,
        seconds=seconds,
        fingerprint=fingerprint,
    )


def recommend(factor: MismatchFactor, finding: Finding, *, readable: bool) -> str:
    """Return what a person should do next."""
    if not readable:
        return "Fix what the failed gates name, then let it run again; nothing was judged."
    side = _SIDES.get(finding.diagnosis)
    if side:
        return factor.recommendation.format(side=side)
    needed = [effect.tokens_needed for effect in finding.effects if effect.tokens_needed]
    if finding.diagnosis is Diagnosis.INSUFFICIENT_EVIDENCE and finding.effects and needed:
        tokens, sequences = finding.effects[0].tokens, finding.effects[0].sequences
        wanted = max(10, -(-max(needed) * sequences // tokens))
        if wanted > sequences:
            return (
                f"Set mismatch_hooks.sample_sequences to about {wanted} to resolve a tenth of the mismatch from native."
            )
    return ""
