"""Which factors can run here, on which reference, in which order, and why others cannot."""

from dataclasses import replace
from typing import Any

import pytest

from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.pipeline.discover import discover
from mismatch_hooks.pipeline.plan import needed_operators, plan
from mismatch_hooks.schema.enums import Expansion, Origin, PlanOutcome, PolicyRole, RebindCost, ReferenceAuthority
from mismatch_hooks.schema.factor import LibraryPin, MismatchFactor, Prerequisites, ReferenceImplementation
from mismatch_hooks.schema.plan import Candidate, Surroundings
from tests.pipeline.samples import FP32, ROLLOUT, ROPE, TRAINING

PATH = ROPE.switch.path
FUSED = ReferenceImplementation(
    name="shared_backend",
    authority=ReferenceAuthority.SHARED_BACKEND,
    covers_paths=(),
    prerequisites=Prerequisites(
        required_packages={"transformer-engine": ">=2.20,<3"}, device="cuda", min_device_count=2
    ),
    pinned_libraries=(LibraryPin(package="transformer-engine", version="2.20.2"),),
    verified_on="nowhere yet",
)


def _here(**changes: Any) -> Surroundings:
    fields: dict[str, Any] = {
        "packages": {},
        "cuda_devices": 0,
        "model_traits": ("rope",),
        "capabilities": {role: {PATH: RebindCost.PER_REQUEST} for role in PolicyRole},
    }
    return Surroundings(**{**fields, **changes})


def _only(factor: MismatchFactor, here: Surroundings) -> Candidate:
    (candidate,) = discover([factor], here)
    return candidate


def test_a_factor_that_both_engines_can_flip_is_planned_on_its_reference() -> None:
    assert _only(ROPE, _here()) == Candidate(factor=ROPE, outcome=PlanOutcome.PLANNED, reference=FP32, reason="")


def test_the_first_reference_whose_needs_are_met_runs_and_the_others_are_explained() -> None:
    both = replace(ROPE, references=(FUSED, FP32))
    found = _only(both, _here())
    assert found.reference is FP32
    assert found.reason == (
        "shared_backend: transformer-engine>=2.20,<3 is not installed, 2 CUDA device(s) needed, 0 found"
    )
    there = _here(packages={"transformer-engine": "2.20.2"}, cuda_devices=2)
    assert (_only(both, there).reference, _only(both, there).reason) == (FUSED, "")


@pytest.mark.parametrize("name", ["transformer_engine", "Transformer-Engine", "transformer.engine"])
def test_a_distribution_is_found_however_it_spells_its_name(name: str) -> None:
    there = _here(packages={name: "2.20.2"}, cuda_devices=2)
    assert _only(replace(ROPE, references=(FUSED,)), there).outcome is PlanOutcome.PLANNED


@pytest.mark.parametrize(
    ("installed", "met"),
    [
        pytest.param("2.20", True, id="the lowest"),
        pytest.param("2.20.2+cu13", True, id="a local build"),
        pytest.param("2.21.0rc1", True, id="a candidate in the range"),
        pytest.param("2.19.9", False, id="too old"),
        pytest.param("3.0", False, id="too new"),
        pytest.param("2.3", False, id="2.3 is older than 2.20"),
    ],
)
def test_installed_versions_are_compared_by_pep_440(installed: str, met: bool) -> None:
    needs = replace(FUSED, prerequisites=Prerequisites(required_packages={"transformer-engine": ">=2.20,<3"}))
    found = _only(replace(ROPE, references=(needs,)), _here(packages={"transformer-engine": installed}))
    assert (found.outcome is PlanOutcome.PLANNED) is met
    if not met:
        assert found.reason == (
            f"no reference can run: shared_backend: transformer-engine {installed} is installed and "
            "transformer-engine>=2.20,<3 is needed"
        )


def test_a_factor_whose_model_trait_is_missing_is_skipped_with_the_trait() -> None:
    found = _only(ROPE, _here(model_traits=()))
    assert (found.outcome, found.reference, found.reason) == (PlanOutcome.SKIPPED, None, "the model has no rope")


@pytest.mark.parametrize(
    ("capabilities", "reason"),
    [
        pytest.param(
            {ROLLOUT: {PATH: RebindCost.PER_REQUEST}},
            f"the training engine has no live switch {PATH}",
            id="an engine that was not given",
        ),
        pytest.param(
            {ROLLOUT: {}, TRAINING: {PATH: RebindCost.PER_REQUEST}},
            f"the rollout engine has no live switch {PATH}",
            id="an engine without the switch",
        ),
        pytest.param(
            {ROLLOUT: {PATH: RebindCost.ENGINE_REBUILD}, TRAINING: {PATH: RebindCost.PER_REQUEST}},
            f"flipping {PATH} on the rollout engine costs an engine rebuild",
            id="an engine rebuild",
        ),
        pytest.param(
            {ROLLOUT: {PATH: RebindCost.PER_REQUEST}, TRAINING: {PATH: RebindCost.PROCESS_GROUP_REBUILD}},
            f"flipping {PATH} on the training engine costs new process groups",
            id="new process groups",
        ),
        pytest.param(
            {ROLLOUT: {PATH: RebindCost.PROCESS_RESTART}, TRAINING: {PATH: RebindCost.PER_REQUEST}},
            f"flipping {PATH} on the rollout engine costs a process restart",
            id="a process restart",
        ),
    ],
)
def test_what_cannot_be_flipped_live_says_what_it_would_cost(capabilities: Any, reason: str) -> None:
    found = _only(ROPE, _here(capabilities=capabilities))
    assert (found.outcome, found.reason) == (PlanOutcome.NOT_SWITCHABLE_IN_PROCESS, reason)


def test_a_one_sided_factor_asks_one_engine_only() -> None:
    one_sided = replace(
        ROPE,
        expansion=Expansion.VALUE_SWEEP,
        switch=replace(ROPE.switch, roles=(ROLLOUT,)),
        references=(),
        call_sites=(ROPE.call_sites[0],),
    )
    here = _here(capabilities={ROLLOUT: {PATH: RebindCost.PER_REQUEST}})
    assert _only(one_sided, here).outcome is PlanOutcome.PLANNED


def test_a_plan_runs_cheap_switches_first_and_drops_nothing() -> None:
    def candidate(name: str, cost: RebindCost, outcome: PlanOutcome = PlanOutcome.PLANNED) -> Candidate:
        factor = replace(ROPE, id=name, switch=replace(ROPE.switch, rebind_cost=cost))
        return Candidate(factor=factor, outcome=outcome, reference=FP32, reason="")

    given = [
        candidate("c.c", RebindCost.ENGINE_REBUILD),
        candidate("b.b", RebindCost.PER_REQUEST),
        candidate("x.x", RebindCost.PER_REQUEST, PlanOutcome.SKIPPED),
        candidate("a.a", RebindCost.PER_REQUEST),
        candidate("y.y", RebindCost.PER_REQUEST, PlanOutcome.NOT_SWITCHABLE_IN_PROCESS),
    ]
    made = plan(given, origin=Origin.NATIVE)
    assert [case.factor.id for case in made.cases] == ["a.a", "b.b", "c.c"]
    assert [case.factor.id for case in made.left_out] == ["x.x", "y.y"]
    assert (made.passes, made.passes_with_proofs) == (8, 10)


def _planned(name: str, path: str, reference: ReferenceImplementation | None = FP32) -> Candidate:
    outcome = PlanOutcome.SKIPPED if reference is None else PlanOutcome.PLANNED
    factor = replace(ROPE, id=name, switch=replace(ROPE.switch, path=path))
    return Candidate(factor=factor, outcome=outcome, reference=reference, reason="" if reference else "needs CUDA")


def test_from_aligned_every_operator_of_the_model_is_on_its_reference_whatever_is_examined() -> None:
    rope, norm, other = _planned("a.rope", "x.rope"), _planned("b.norm", "x.norm"), _planned("c.plugin", "x.plugin")
    made = plan([rope], origin=Origin.ALIGNED, beside=[rope, norm, other], needed=["x.rope", "x.norm"])
    assert (made.origin, made.fallback) == (Origin.ALIGNED, "")
    assert [one.factor.id for one in made.background] == ["b.norm"]  # not examined, and no operator of the model: c
    assert made.passes == 4
    native = plan([rope], origin=Origin.NATIVE, beside=[rope, norm], needed=["x.rope", "x.norm"])
    assert native.background == ()


def test_where_an_operator_has_no_reference_the_plan_is_from_native_and_says_which() -> None:
    rope, norm = _planned("a.rope", "x.rope"), _planned("b.norm", "x.norm", None)
    made = plan([rope], origin=Origin.ALIGNED, beside=[rope, norm], needed=["x.rope", "x.norm", "x.moe"])
    assert (made.origin, made.background) == (Origin.NATIVE, ())
    assert made.fallback.endswith("some have none here (x.norm: needs CUDA; x.moe: no factor has it)")


@pytest.mark.parametrize(
    ("traits", "over_ranks", "present"),
    [
        pytest.param(("rmsnorm", "rope", "gated_mlp"), False, set(), id="Llama"),
        pytest.param(("qk_norm",), False, {"operator.qk_norm.implementation"}, id="Qwen3"),
        pytest.param(("moe",), False, {"operator.moe.router", "operator.moe.grouped_gemm"}, id="experts"),
        pytest.param((), True, {"operator.linear.reduction"}, id="two ranks"),
    ],
)
def test_what_aligned_needs_follows_from_the_model(
    traits: tuple[str, ...], over_ranks: bool, present: set[str]
) -> None:
    cost = RebindCost.PER_REQUEST if over_ranks else RebindCost.PROCESS_GROUP_REBUILD
    found = needed_operators(traits, {ROLLOUT: {"operator.linear.reduction": cost}})
    always = {"operator.attention.kernel", "operator.linear.implementation", "operator.head.implementation"}
    assert always <= set(found)
    varying = {"operator.qk_norm.implementation", "operator.moe.router", "operator.moe.grouped_gemm"}
    assert set(found) & (varying | {"operator.linear.reduction"}) == present
    declared = {factor.switch.path for factor in load_registry().factors.values() if factor.references}
    assert {path for path in found if not path.startswith("operator.moe.")} <= declared


def test_what_is_blocked_is_skipped_with_what_it_waits_for() -> None:
    blocked = replace(ROPE, prerequisites=Prerequisites(blocked_by=("no such model has run", "no adapter")))
    found = _only(blocked, _here())
    assert (found.outcome, found.reason) == (PlanOutcome.SKIPPED, "no such model has run; no adapter")


def test_an_operator_of_torch_is_there_only_where_it_is_registered() -> None:
    needs = replace(FP32, prerequisites=Prerequisites(required_ops=("_C::rms_norm",)))
    without = _only(replace(ROPE, references=(needs,)), _here())
    assert without.reason == "no reference can run: fp32: torch has no operator _C::rms_norm here"
    assert _only(replace(ROPE, references=(needs,)), _here(ops=("_C::rms_norm",))).reference == needs
