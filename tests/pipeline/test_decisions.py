"""From gates and arms to a published verdict: nothing is judged behind a failed gate, whatever the arms say."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.decision_quality import ATTRIBUTIONS, NOISES, Case, healthy, judge
from mismatch_hooks.pipeline.diagnose import (
    Finding,
    blocked,
    diagnose_content,
    diagnose_from_aligned,
    diagnose_from_native,
    diagnose_sweep,
)
from mismatch_hooks.pipeline.report import report
from mismatch_hooks.pipeline.score import ArmTokens, PassKey
from mismatch_hooks.pipeline.verify import verify
from mismatch_hooks.schema.enums import Arm, Diagnosis, ExecutionPath, GateName, NoiseFloor, Origin, SwitchStatus
from mismatch_hooks.schema.freeze import SchemaError
from mismatch_hooks.schema.score import Score
from mismatch_hooks.schema.verdict import ArmReading, Gate, Verdict
from tests.pipeline.samples import (
    EPSILONS,
    NATIVE,
    REFERENCE,
    ROLLOUT,
    ROPE,
    SEQUENCES,
    TRAINING,
    WHOLE,
    arm_tokens,
    calls,
    digest,
    other_side,
    passes,
    shard,
    switch_state,
)

GATES = st.tuples(*(st.booleans() for _ in GateName)).map(
    lambda held: tuple(Gate(name=name, ok=ok, reason=f"{name.value}.") for name, ok in zip(GateName, held, strict=True))
)


@st.composite
def arm_sets(draw: st.DrawFn, names: tuple[str, ...]) -> dict[str, ArmTokens]:
    """Arms that differ by nothing, by noise, by a scale or by a number that is none; empty, small and large enough."""
    sequences, tokens = draw(st.sampled_from((0, 1, 2, 9, 10, 12))), draw(st.integers(1, 6))
    stream = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    native = 0.1 * stream.standard_t(3, (sequences, tokens))
    kinds: dict[str, Callable[[], np.ndarray]] = {
        "native": lambda: native,
        "equal": lambda: 0.0 * native,
        "smaller": lambda: 0.1 * native,
        "larger": lambda: 3.0 * native,
        "redrawn": lambda: 0.1 * stream.standard_t(3, native.shape),
        "nan": lambda: np.where(stream.random(native.shape) < 0.3, np.nan, native),
        "infinite": lambda: np.where(stream.random(native.shape) < 0.3, -np.inf, native),
    }
    first = draw(st.sampled_from(("native", "equal", "nan")))
    rest = [draw(st.sampled_from(sorted(kinds))) for _ in names[1:]]
    return {name: arm_tokens(kinds[kind]()) for name, kind in zip(names, [first, *rest], strict=True)}


FOUR = arm_sets(tuple(Arm))
TENSORS = st.dictionaries(st.sampled_from("abc"), st.sampled_from(["1", "2"]))
FINDINGS = st.one_of(
    FOUR.map(lambda arms: diagnose_from_native(arms, **EPSILONS)),
    FOUR.map(diagnose_from_aligned),
    arm_sets(("native", "rollout=a", "rollout=b")).map(lambda arms: diagnose_sweep(arms, **EPSILONS)),
    st.builds(
        lambda ours, theirs: diagnose_content(digest(ROLLOUT, ours), digest(TRAINING, theirs), differing_since=None),
        TENSORS,
        TENSORS,
    ),
)


def _publish(finding: Finding, gates: tuple[Gate, ...]) -> Verdict:
    return report(
        ROPE,
        finding,
        gates=gates,
        arms=tuple(ArmReading(arm=arm, metrics={"tokens": 3.0}) for arm in Arm),
        origin=Origin.NATIVE,
        noise_floor=NoiseFloor.PRODUCTION,
        path=ExecutionPath.ROLLOUT_FULL_PREFILL,
        tokens=3,
        passes=4,
        seconds=0.1,
        fingerprint="f",
    )


@settings(max_examples=300)
@given(gates=GATES, finding=FINDINGS)
def test_no_verdict_is_judged_while_a_gate_failed_whatever_the_arms_are(
    gates: tuple[Gate, ...], finding: Finding
) -> None:
    failed = [gate for gate in gates if not gate.ok]
    verdict = _publish(blocked(gates) or finding, gates)
    if failed:
        assert not verdict.diagnosis.judged
        assert (verdict.arms, verdict.effects) == ((), ())
        assert verdict.reason == " ".join(gate.reason for gate in failed)
    else:
        assert (verdict.diagnosis, verdict.effects) == (finding.diagnosis, finding.effects)


@settings(max_examples=300)
@given(gates=GATES, finding=FINDINGS)
def test_a_caller_that_forgets_the_gates_cannot_publish_what_the_arms_say(
    gates: tuple[Gate, ...], finding: Finding
) -> None:
    if finding.diagnosis.judged and not all(gate.ok for gate in gates):
        with pytest.raises(SchemaError, match=f"{finding.diagnosis.value} cannot be published while"):
            _publish(finding, gates)
    else:
        assert _publish(finding, gates).diagnosis is finding.diagnosis


@pytest.mark.parametrize("diagnosis", Diagnosis)
def test_of_sixteen_states_of_the_gates_one_lets_a_judgement_through(diagnosis: Diagnosis) -> None:
    published = []
    for held in product((True, False), repeat=len(GateName)):
        gates = tuple(Gate(name=name, ok=ok, reason="") for name, ok in zip(GateName, held, strict=True))
        try:
            published.append((held, _publish(Finding(diagnosis=diagnosis, reason=""), gates).diagnosis))
        except SchemaError:
            continue
    assert len(published) == (1 if diagnosis.judged else 16)
    assert ((True,) * len(GateName), diagnosis) in published


def _without_switches(score: Score) -> Score:
    return replace(score, evidence=replace(score.evidence, switches=()))


def _fell_back(score: Score) -> Score:
    requested = score.evidence.switches[0].requested
    other = NATIVE if requested is REFERENCE else REFERENCE
    state = switch_state(requested, effective=other, status=SwitchStatus.FELL_BACK)
    return replace(score, evidence=replace(score.evidence, switches=(state,)))


def _unobservable(score: Score) -> Score:
    state = replace(score.evidence.switches[0], effective=None, status=SwitchStatus.UNOBSERVABLE)
    return replace(score, evidence=replace(score.evidence, switches=(state,)))


def _no_forward(score: Score) -> Score:
    return replace(score, evidence=replace(score.evidence, forwards=(0,)))


def _half_of_the_calls(score: Score) -> Score:
    count = calls(score.binding.role, observed=2)
    return replace(score, evidence=replace(score.evidence, calls=(count,)))


def _no_calls(score: Score) -> Score:
    return replace(score, evidence=replace(score.evidence, calls=()))


# What may befall one pass, by name; the last two only one that is bound: a native pass has no calls to count.
FAULTS: Mapping[str, Callable[[Score], Score | None]] = {
    "never arrived": lambda score: None,
    "switch not read": _without_switches,
    "switch fell back": _fell_back,
    "switch unobservable": _unobservable,
    "no forward counted": _no_forward,
    "no shard": lambda score: replace(score, shards=()),
    "another rank missing": lambda score: replace(score, shards=(shard(0, 2, WHOLE),)),
    "a token missing": lambda score: replace(score, shards=(shard(slices=((0, 0, (-1.0,)), WHOLE[1])),)),
    "a token twice": lambda score: replace(score, shards=(shard(slices=(*WHOLE, (0, 1, (-9.0,)))),)),
    "half of the calls": _half_of_the_calls,
    "no calls": _no_calls,
}
_OF_NATIVE = list(FAULTS)[:-2]
_FAULTS_OF_PASSES = st.fixed_dictionaries(
    {},
    optional={key: st.sampled_from(_OF_NATIVE if key[1] is NATIVE else list(FAULTS)) for key in passes()},
)


@settings(max_examples=300)
@given(
    faults=_FAULTS_OF_PASSES,
    unwatched=st.sets(st.sampled_from((ROLLOUT, TRAINING))),
    pitfalls=st.lists(st.just("Weights differ."), max_size=1),
    finding=FINDINGS,
)
def test_any_fault_of_any_pass_leaves_nothing_judged(
    faults: dict[PassKey, str], unwatched: set[Any], pitfalls: list[str], finding: Finding
) -> None:
    scored = {key: FAULTS[faults[key]](score) if key in faults else score for key, score in passes().items()}
    watched = {role: states for role, states in other_side().items() if role not in unwatched}
    arrived = {key: score for key, score in scored.items() if score is not None}
    gates = verify(ROPE, arrived, watched, SEQUENCES, pitfalls)
    assert all(gate.ok for gate in gates) is not bool(faults or unwatched or pitfalls)
    verdict = _publish(blocked(gates) or finding, gates)
    if faults or unwatched or pitfalls:
        assert (verdict.diagnosis.judged, verdict.arms, verdict.effects) == (False, (), ())


@settings(max_examples=100)
@given(arms=FOUR)
def test_exchanging_the_sides_exchanges_the_accusation(arms: dict[str, ArmTokens]) -> None:
    one, other = Arm.ROLLOUT_REFERENCE_ONLY, Arm.TRAINING_REFERENCE_ONLY
    exchanged = {**arms, one: arms[other], other: arms[one]}
    sides = {Diagnosis.CAUSED_BY_ROLLOUT_SIDE, Diagnosis.CAUSED_BY_TRAINING_SIDE}
    for diagnose in (lambda given: diagnose_from_native(given, **EPSILONS), diagnose_from_aligned):
        here, there = diagnose(arms).diagnosis, diagnose(exchanged).diagnosis
        assert {here, there} == sides if here in sides else here is there


@settings(max_examples=100)
@given(arms=FOUR, seed=st.integers(0, 2**32 - 1))
def test_the_order_of_tokens_decides_nothing(arms: dict[str, ArmTokens], seed: int) -> None:
    order = np.random.default_rng(seed).permutation(arms[Arm.BOTH_NATIVE].training.size)
    shuffled = {
        arm: ArmTokens(training=one.training[order], rollout=one.rollout[order], sequence=one.sequence[order])
        for arm, one in arms.items()
    }
    assert diagnose_from_native(shuffled, **EPSILONS).diagnosis is diagnose_from_native(arms, **EPSILONS).diagnosis


def test_factors_without_an_effect_are_not_accused() -> None:
    """Of 210 simulated matrices without an effect, at most 9 are attributed.

    At the stated rate of 1 % the chance of 10 or more is 6e-5 (binomial), and the seed is fixed. The benchmark gives
    the rate itself.
    """
    cases = [case for case in healthy(350, seed=0) if case.sequences <= 32]
    assert (len(cases), {case.noise for case in cases}) == (210, set(NOISES))
    assert sum(judge(case) in ATTRIBUTIONS for case in cases) <= 9


@pytest.mark.parametrize("needs_both", [False, True], ids=["rollout", "both sides"])
def test_a_cause_that_few_tokens_show_badly_is_not_put_elsewhere(needs_both: bool) -> None:
    """A quarter of the mismatch removed, 640 tokens: about as often found as not, and never on the wrong side.

    Another side is named only when two arms that are alike are told apart, half the level each time: 0.3 % for two of
    them, so 3 or more of 100 have a chance of 5e-3, and the seed is fixed.
    """
    right = Diagnosis.CAUSED_BY_BOTH_SIDES if needs_both else Diagnosis.CAUSED_BY_ROLLOUT_SIDE
    said = [
        judge(Case(noise="as measured", sequences=10, tokens=64, seed=(1, i), removed=0.25, needs_both=needs_both))
        for i in range(100)
    ]
    assert right in said
    assert sum(answer in ATTRIBUTIONS and answer is not right for answer in said) <= 2
