"""Declarations are refused where they are made."""

from dataclasses import replace
from typing import Any

import pytest

from mismatch_hooks.schema.enums import (
    Choice,
    Expansion,
    FactorCategory,
    PolicyRole,
    RebindCost,
    ReferenceAuthority,
    SettingChannel,
)
from mismatch_hooks.schema.factor import (
    CallSite,
    LibraryPin,
    MismatchFactor,
    Prerequisites,
    ReferenceImplementation,
    Switch,
)
from mismatch_hooks.schema.freeze import FrozenMapping, SchemaError

FP32 = ReferenceImplementation(
    name="fp32", authority=ReferenceAuthority.SELF_WRITTEN, covers_paths=(), verified_on="CPU"
)
SITES = (CallSite(role=PolicyRole.ROLLOUT, name="r"), CallSite(role=PolicyRole.TRAINING, name="t"))


def _factor(**changes: Any) -> MismatchFactor:
    fields: dict[str, Any] = {
        "id": "attention.rope_fusion",
        "category": FactorCategory.KERNEL_IMPLEMENTATION,
        "question": "?",
        "switch": Switch(path="operator.rope", allowed=("native", "reference")),
        "references": (FP32,),
        "call_sites": SITES,
    }
    return MismatchFactor(**{**fields, **changes})


@pytest.mark.parametrize(
    "version",
    [
        pytest.param("2.20.2", id="a release"),
        pytest.param("1", id="one number"),
        pytest.param("2.13.0+cpu", id="a local build"),
        pytest.param("0.7.4rc1", id="a candidate"),
        pytest.param("1.0.post2.dev3", id="a development release"),
    ],
)
def test_a_pin_takes_one_exact_version(version: str) -> None:
    assert LibraryPin(package="p", version=version).version == version


@pytest.mark.parametrize(
    "version",
    ["", ">=1.0", "==1.0", "~=1.2", "1.*", "1.2.x", "1.0,<2", "1.0 ", " 1.0", "<2", "!=1", "v1.0", "latest", "²"],
)
def test_a_pin_refuses_ranges_and_specifiers(version: str) -> None:
    with pytest.raises(SchemaError) as refused:
        LibraryPin(package="p", version=version)
    assert str(refused.value) == (
        f"LibraryPin p: got version {version!r}; accepts one exact observed version such as '1.2.3'."
    )


def test_a_reference_pins_every_package_that_it_needs() -> None:
    needs = Prerequisites(required_packages={"a": ">=1", "b": ">=2"})
    with pytest.raises(SchemaError, match=r"^ReferenceImplementation fused: b is needed and not pinned; add the exact"):
        ReferenceImplementation(
            name="fused",
            authority=ReferenceAuthority.SHARED_BACKEND,
            covers_paths=(),
            prerequisites=needs,
            pinned_libraries=(LibraryPin(package="a", version="1.0"),),
            verified_on="CPU",
        )


@pytest.mark.parametrize(
    "allowed",
    [
        pytest.param((), id="no value"),
        pytest.param(("native",), id="one value"),
        pytest.param(("native", "native"), id="the same value twice"),
        pytest.param(("native", "reference", "native"), id="one of three twice"),
    ],
)
def test_a_switch_needs_two_different_values(allowed: tuple[str, ...]) -> None:
    with pytest.raises(SchemaError, match=r"^Switch operator\.rope: allowed is .*; a switch needs two or more values"):
        Switch(path="operator.rope", allowed=allowed)


def test_the_values_of_a_switch_are_a_frozen_snapshot() -> None:
    values: Any = ["native", "a", 2]
    switch = Switch(path="p", allowed=values)
    values.append("later")
    assert switch.allowed == ("native", "a", 2)


def test_the_first_value_of_a_switch_is_native() -> None:
    with pytest.raises(SchemaError, match=r"^Switch p: the first value is 1; accepts 'native' there\.$"):
        Switch(path="p", allowed=(1, 2))


SWEEP: dict[str, Any] = {
    "expansion": Expansion.VALUE_SWEEP,
    "switch": Switch(path="p", allowed=("native", 1, "whole"), roles=(PolicyRole.TRAINING,)),
    "references": (),
}


def test_a_sweep_has_a_baseline_arm_and_one_arm_for_each_value() -> None:
    factor = _factor(**SWEEP)
    assert factor.arms == {
        "native": {PolicyRole.ROLLOUT: Choice.NATIVE, PolicyRole.TRAINING: Choice.NATIVE},
        "training=1": {PolicyRole.ROLLOUT: Choice.NATIVE, PolicyRole.TRAINING: 1},
        "training=whole": {PolicyRole.ROLLOUT: Choice.NATIVE, PolicyRole.TRAINING: "whole"},
    }
    assert factor.passes == ((PolicyRole.TRAINING, 1), (PolicyRole.TRAINING, "whole"))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param({"references": ()}, "four arms need a reference, the values", id="four arms without a reference"),
        pytest.param(
            {"switch": Switch(path="p", allowed=("native", "reference"), roles=(PolicyRole.TRAINING,))},
            "four arms need a reference, the values",
            id="four arms on one side",
        ),
        pytest.param({**SWEEP, "references": (FP32,)}, "value_sweep has no use for references", id="a sweep with one"),
    ],
)
def test_arms_and_references_fit_each_other(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SchemaError, match=f"^attention\\.rope_fusion: {sentence}"):
        _factor(**changes)


def test_only_what_is_bound_in_the_live_models_needs_an_adapter() -> None:
    live = _factor()
    an_argument = _factor(**SWEEP | {"switch": replace(SWEEP["switch"], channel=SettingChannel.SCORING_PASS)})
    offline = _factor(**SWEEP | {"switch": replace(SWEEP["switch"], rebind_cost=RebindCost.ENGINE_REBUILD)})
    assert [live.needs_adapter, an_argument.needs_adapter, offline.needs_adapter] == [True, False, False]


@pytest.mark.parametrize("name", ["rope", "a.b.c", "", "attention.", ".rope", "attention.Rope", "a b.c", "1a.b"])
def test_a_factor_id_is_two_lower_case_identifiers(name: str) -> None:
    with pytest.raises(SchemaError) as refused:
        _factor(id=name)
    assert str(refused.value) == (
        f"MismatchFactor.id: got {name!r}; accepts 'operator.factor', both lower-case identifiers."
    )


def test_a_factor_knows_its_operator() -> None:
    assert _factor().operator == "attention"


def test_every_role_of_the_switch_needs_a_call_site() -> None:
    with pytest.raises(SchemaError, match=r"^attention\.rope_fusion: no call site for training; every role"):
        _factor(call_sites=SITES[:1])
    one_sided = replace(SWEEP["switch"], roles=(PolicyRole.ROLLOUT,))
    assert _factor(**{**SWEEP, "switch": one_sided}, call_sites=SITES[:1]).switch.roles == (PolicyRole.ROLLOUT,)


def test_prerequisites_are_frozen_and_know_one_kind_of_device() -> None:
    packages = {"a": ">=1"}
    needs = Prerequisites(required_packages=packages)
    packages["b"] = "<2"
    assert (type(needs.required_packages), needs.required_packages) == (FrozenMapping, {"a": ">=1"})
    with pytest.raises(SchemaError, match=r"^Prerequisites\.device: got 'gpu'; accepts '' or 'cuda'\.$"):
        Prerequisites(device="gpu")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        pytest.param(
            {"commit": "main"}, "got commit 'main'; accepts 7 to 40 hexadecimal digits, not a branch", id="branch"
        ),
        pytest.param({"commit": "abc"}, "got commit 'abc'; accepts 7 to 40", id="too short"),
        pytest.param(
            {"container_digest": "nemo:26.02"}, "got container_digest 'nemo:26.02'; accepts 'sha256:'", id="tag"
        ),
    ],
)
def test_a_pin_takes_no_name_that_moves(changes: dict[str, str], sentence: str) -> None:
    with pytest.raises(SchemaError) as refused:
        LibraryPin(package="p", version="1.0", **changes)
    assert str(refused.value).startswith(f"LibraryPin p: {sentence}")
    kept = LibraryPin(package="p", version="1.0", commit="0123abc", container_digest="sha256:" + "0" * 64)
    assert kept.commit == "0123abc"


def test_a_required_operator_has_a_namespace() -> None:
    with pytest.raises(
        SchemaError, match=r"^Prerequisites\.required_ops: got 'rms_norm'; accepts 'namespace::name'\.$"
    ):
        Prerequisites(required_ops=("rms_norm",))


def test_a_blocked_factor_is_declared_without_anything_to_bind() -> None:
    blocked = Prerequisites(blocked_by=("no such model has run",))
    factor = _factor(references=(), call_sites=(), prerequisites=blocked)
    assert not factor.needs_adapter
