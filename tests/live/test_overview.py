"""What list, plan and doctor say, without an engine and without loading torch."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mismatch_hooks.live.overview import (
    UnknownOperatorError,
    cuda_devices,
    examine_host,
    list_factors,
    plan_factors,
)
from mismatch_hooks.live.registry import Registry, UnknownFactorError, load_registry
from mismatch_hooks.schema.enums import ModelFamily, NoiseFloor, Origin, RebindCost
from tests.pipeline.samples import ROPE
from tests.tiny_models import tiny_checkpoint


def _plan(registry: Registry | None = None, **changes: Any) -> dict[str, Any]:
    given = {
        "operator": None,
        "factor": None,
        "origin": Origin.NATIVE,
        "noise_floor": NoiseFloor.PRODUCTION,
        "family": ModelFamily.DENSE,
        "model": None,
        **changes,
    }
    return plan_factors(registry or load_registry(), **given)


def test_every_factor_is_listed_with_what_keeps_it_from_running() -> None:
    rows = {row["id"]: row for row in list_factors(load_registry())["factors"]}
    assert rows["attention.rope_fusion"]["outcome"] == "planned"
    assert rows["rollout.compile"]["outcome"] == "not_switchable_in_process"
    assert rows["rollout.compile"]["cost"] == "engine_rebuild"
    assert rows["weights.sync"]["expansion"] == "content"


def test_an_unknown_operator_names_those_that_exist_and_the_nearest() -> None:
    with pytest.raises(UnknownOperatorError, match=r"^--operator: got 'nrom'; registered: activation, .* 'norm'\?$"):
        list_factors(load_registry(), operator="nrom")


def test_a_factor_of_another_operator_is_no_empty_success() -> None:
    with pytest.raises(UnknownFactorError, match=r"^--factor weights\.sync: no factor of norm matches; leave one"):
        _plan(operator="norm", factor="weights.sync")


def test_a_plan_counts_its_passes_and_says_what_is_left_out() -> None:
    made = _plan(operator="rollout")
    assert [case["factor"] for case in made["cases"]] == ["rollout.execution_path", "rollout.batch_size"]
    assert made["passes"] == 2 + 4 + 1
    assert {left["outcome"] for left in made["left_out"]} == {"not_switchable_in_process"}
    assert all("costs" in left["reason"] for left in made["left_out"])


def test_a_models_folder_says_which_traits_it_has(tmp_path: Path) -> None:
    llama, qwen3 = (tiny_checkpoint(tmp_path, shape=shape) for shape in ("llama", "qwen3"))
    assert [left["reason"] for left in _plan(factor="norm.qk_norm", model=llama)["left_out"]] == [
        "the model has no qk_norm"
    ]
    assert [case["factor"] for case in _plan(factor="norm.qk_norm", model=qwen3)["cases"]] == ["norm.qk_norm"]


def test_two_hundred_factors_are_planned_in_order_of_cost_and_none_is_lost() -> None:
    factors = {
        f"toy.f{index:03d}": replace(
            ROPE,
            id=f"toy.f{index:03d}",
            switch=replace(ROPE.switch, path=f"toy.{index}", rebind_cost=list(RebindCost)[index % 4]),
        )
        for index in range(200)
    }
    made = _plan(Registry(factors=factors, adapters={}))
    assert len(made["cases"]) == 50
    assert len(made["cases"]) + len(made["left_out"]) == 200


def test_a_plugin_that_did_not_load_is_a_miss() -> None:
    found = examine_host(Registry(factors={ROPE.id: ROPE}, adapters={}, broken={"theirs": "no licence"}))
    (broken,) = (check for check in found["checks"] if check["check"] == "operator check theirs")
    assert (found["ok"], broken["ok"], broken["found"], broken["fix"]) == (False, False, "no licence", "mend theirs")


def test_an_engine_outside_the_versions_that_were_run_is_a_miss_with_its_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mismatch_hooks.live.overview.version", lambda name: "0.9.1")
    checks = {check["check"]: check for check in examine_host(load_registry())["checks"]}
    assert checks["rollout engine vllm"]["ok"] is False
    assert checks["rollout engine vllm"]["fix"] == "pip install 'mismatch-hooks[vllm]'"


@pytest.mark.parametrize(("visible", "expected"), [("", 0), ("-1", 0), ("0,1", 0)])
def test_devices_that_may_not_be_seen_do_not_count(
    monkeypatch: pytest.MonkeyPatch, visible: str, expected: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    assert cuda_devices() == expected
