"""The published verdict: nothing readable behind a failed gate, and always what to do next."""

from typing import Any

import numpy as np
import pytest

from mismatch_hooks.pipeline.diagnose import Finding, diagnose_from_native
from mismatch_hooks.pipeline.report import report
from mismatch_hooks.schema.enums import Arm, Diagnosis, ExecutionPath, GateName, NoiseFloor, Origin
from mismatch_hooks.schema.freeze import SchemaError
from mismatch_hooks.schema.verdict import ArmReading, Gate, Verdict
from tests.pipeline.samples import EPSILONS, ROPE, arms

HOLD = tuple(Gate(name=name, ok=True, reason="") for name in GateName)
ONE_FAILED = (*HOLD[:3], Gate(name=GateName.PITFALLS_CLEAR, ok=False, reason="Weights differ."))
READINGS = tuple(ArmReading(arm=arm, metrics={"tokens": 4.0}) for arm in Arm)


def _unresolved(sequences: int, tokens: int) -> Finding:
    stream = np.random.default_rng(0)
    rows = [0.03 * stream.standard_t(3, (sequences, tokens)) for _ in Arm]
    return diagnose_from_native(arms(*rows), **EPSILONS)


def _report(finding: Finding, gates: Any = HOLD) -> Verdict:
    return report(
        ROPE,
        finding,
        gates=gates,
        arms=READINGS,
        origin=Origin.NATIVE,
        noise_floor=NoiseFloor.PRODUCTION,
        path=ExecutionPath.ROLLOUT_FULL_PREFILL,
        tokens=100,
        passes=4,
        seconds=1.5,
        fingerprint="f",
    )


@pytest.mark.parametrize(
    ("diagnosis", "recommendation"),
    [
        pytest.param(Diagnosis.CAUSED_BY_ROLLOUT_SIDE, "put rope in fp32 on the rollout side.", id="rollout"),
        pytest.param(Diagnosis.CAUSED_BY_TRAINING_SIDE, "put rope in fp32 on the training side.", id="training"),
        pytest.param(
            Diagnosis.CAUSED_BY_BOTH_SIDES, "put rope in fp32 on the rollout and the training side.", id="both"
        ),
        pytest.param(Diagnosis.NOT_THIS_FACTOR, "", id="cleared"),
        pytest.param(Diagnosis.COUPLED_WITH_OTHER_FACTORS, "", id="coupled"),
    ],
)
def test_an_accused_side_is_told_what_to_do(diagnosis: Diagnosis, recommendation: str) -> None:
    verdict = _report(Finding(diagnosis=diagnosis, reason="r"))
    assert (verdict.factor, verdict.recommendation, verdict.arms) == (ROPE.id, recommendation, READINGS)


def test_a_blocked_verdict_carries_no_arm_and_no_effect() -> None:
    effects = _unresolved(12, 8).effects
    finding = Finding(diagnosis=Diagnosis.INSUFFICIENT_EVIDENCE, reason="Weights differ.", effects=effects)
    verdict = _report(finding, ONE_FAILED)
    assert (verdict.arms, verdict.effects, verdict.tokens) == ((), (), 100)
    assert verdict.recommendation == "Fix what the failed gates name, then let it run again; nothing was judged."


def test_a_judged_finding_cannot_be_reported_past_a_failed_gate() -> None:
    with pytest.raises(SchemaError, match="not_this_factor cannot be published while pitfalls_clear failed"):
        _report(Finding(diagnosis=Diagnosis.NOT_THIS_FACTOR, reason=""), ONE_FAILED)


def test_an_unresolved_verdict_says_how_many_sequences_would_do() -> None:
    finding = _unresolved(12, 64)
    needed = max(effect.tokens_needed or 0 for effect in finding.effects)
    verdict = _report(finding)
    assert needed > 12 * 64
    assert verdict.recommendation == (
        f"Set mismatch_hooks.sample_sequences to about {-(-needed // 64)} to resolve a tenth of the mismatch from "
        "native."
    )
    assert verdict.effects == finding.effects
