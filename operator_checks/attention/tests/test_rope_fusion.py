"""What the declaration of ``attention.rope_fusion`` promises, checked against the rest of the library."""

from packaging.specifiers import SpecifierSet

from mismatch_hooks.operator_checks.attention.factors.rope_fusion import FACTOR
from mismatch_hooks.pipeline.guards import GUARDS
from mismatch_hooks.schema.enums import ExecutionPath, PolicyRole, RebindCost, ReferenceAuthority


def test_every_pitfall_of_the_factor_has_a_guard() -> None:
    assert [pitfall for pitfall in FACTOR.pitfalls if pitfall not in GUARDS] == []


def test_every_pinned_version_lies_in_the_range_that_is_accepted() -> None:
    for reference in FACTOR.references:
        pins = {pin.package: pin.version for pin in reference.pinned_libraries}
        assert set(reference.prerequisites.required_packages) <= set(pins)
        for package, accepted in reference.prerequisites.required_packages.items():
            assert SpecifierSet(accepted).contains(pins[package]), f"{package}=={pins[package]} is not {accepted}"


def test_the_shared_backend_is_preferred_and_fp32_runs_everywhere() -> None:
    shared, fp32 = FACTOR.references
    assert (shared.name, shared.authority, shared.prerequisites.device) == (
        "shared_backend",
        ReferenceAuthority.SHARED_BACKEND,
        "cuda",
    )
    assert (fp32.name, fp32.authority, fp32.prerequisites.required_packages) == (
        "fp32",
        ReferenceAuthority.SELF_WRITTEN,
        {},
    )
    assert fp32.covers_paths == tuple(ExecutionPath)


def test_the_shared_backend_says_that_it_was_not_run() -> None:
    assert FACTOR.references[0].verified_on.startswith("not run on a GPU yet")


def test_the_switch_is_flipped_live_on_both_sides() -> None:
    assert (FACTOR.switch.rebind_cost, FACTOR.switch.roles) == (RebindCost.PER_REQUEST, tuple(PolicyRole))


def test_the_recommendation_names_the_side() -> None:
    assert "on the rollout side" not in FACTOR.recommendation
    assert "on the training side" in FACTOR.recommendation.format(side="training").replace("of the", "on the")
