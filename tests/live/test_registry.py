"""Operator checks are found by entry point: ours, another distribution's, and the broken ones by name.

The second distribution is ``tests/plugin_distribution``, built and installed for real. Its copy is given broken
operators beside the working one: a host must learn which plugin failed and keep all the others.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mismatch_hooks.live.registry import Registry, UnknownFactorError, load_registry
from mismatch_hooks.schema.freeze import FrozenMapping

DISTRIBUTION = Path(__file__).parents[1] / "plugin_distribution"
SCALE = (DISTRIBUTION / "extra_checks/toy/factors/scale.py").read_text(encoding="utf-8")

# Operators that cannot be used, each in its own way: file to text.
BROKEN = {
    "attention/__init__.py": "",
    "attention/adapter.py": "",
    "attention/factors/__init__.py": "",
    "attention/factors/rope_fusion.py": SCALE.replace('"toy.scale"', '"attention.rope_fusion"'),
    "unfinished/__init__.py": "",
    "unfinished/adapter.py": "",
    "unfinished/factors/__init__.py": "",
    "unfinished/factors/later.py": "",
    "misnamed/__init__.py": "",
    "misnamed/adapter.py": "",
    "misnamed/factors/__init__.py": "",
    "misnamed/factors/other.py": SCALE,
    "raising/__init__.py": "",
    "raising/adapter.py": "",
    "raising/factors/__init__.py": "raise RuntimeError('no licence')",
    "unguarded/__init__.py": "",
    "unguarded/adapter.py": "",
    "unguarded/factors/__init__.py": "",
    "unguarded/factors/scale.py": SCALE.replace('"toy.scale",', '"unguarded.scale",\n    pitfalls=("weight_differ",),'),
    "unseen/__init__.py": "",
    "unseen/adapter.py": "",
    "unseen/factors/__init__.py": "",
    "unseen/factors/scale.py": SCALE.replace('"toy.scale",', '"unseen.scale",\n    required_evidence=("model shap",),'),
    "unbound/__init__.py": "",
    "unbound/factors/__init__.py": "",
    "unbound/factors/scale.py": SCALE.replace('"toy.scale"', '"unbound.scale"'),
}

PRINT_REGISTRY = """
import json
from types import SimpleNamespace
from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.pipeline.bind import CallCounter, patched
from mismatch_hooks.schema.enums import PolicyRole
registry = load_registry()
adapter = registry.adapter("toy.scale")
parameters = adapter.parameters("toy.scale", SimpleNamespace(head_dim=64))
model = SimpleNamespace(scale=lambda number: number)
with patched(adapter.sites("toy.scale", PolicyRole.ROLLOUT, model, parameters), CallCounter()):
    scaled = model.scale(2)
print(json.dumps({
    "factors": list(registry.factors), "adapters": dict(registry.adapters), "broken": dict(registry.broken),
    "scaled": scaled,
}))
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What a process sees that has the second distribution on its path."""
    source, target = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    shutil.copytree(DISTRIBUTION, source, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in BROKEN.items():
        path = source / "extra_checks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    project = source / "pyproject.toml"
    project.write_text(
        project.read_text(encoding="utf-8").replace(
            'extra = "extra_checks"', 'extra = "extra_checks"\ngone = "extra_gone"'
        ),
        encoding="utf-8",
    )
    install = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    subprocess.run([*install, "--no-build-isolation", "--target", target, source], check=True, capture_output=True)
    process = subprocess.run(
        [sys.executable, "-c", PRINT_REGISTRY],
        env={**os.environ, "PYTHONPATH": str(target)},
        cwd=target,
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    return {**json.loads(process.stdout), "stderr": process.stderr}


def test_our_own_checks_are_found_by_their_entry_point() -> None:
    registry = load_registry()
    assert "attention.rope_fusion" in registry.factors
    assert registry.adapters["attention.rope_fusion"] == "mismatch_hooks.operator_checks.attention.adapter"
    assert registry.broken == {}
    assert callable(registry.adapter("attention.rope_fusion").sites)


def test_the_registry_is_read_once_and_frozen() -> None:
    assert load_registry() is load_registry()
    assert type(load_registry().factors) is FrozenMapping


def test_a_second_distribution_adds_its_operators_and_they_work(seen: Any) -> None:
    assert "toy.scale" in seen["factors"] and "attention.rope_fusion" in seen["factors"]
    assert seen["adapters"]["toy.scale"] == "extra_checks.toy.adapter"
    assert seen["scaled"] == 128


def test_a_factor_that_two_distributions_declare_stays_ours_and_the_other_is_named(seen: Any) -> None:
    assert seen["adapters"]["attention.rope_fusion"] == "mismatch_hooks.operator_checks.attention.adapter"
    assert seen["broken"]["extra_checks.attention"] == (
        "SchemaError: attention.rope_fusion is declared by mismatch_hooks.operator_checks.attention already; "
        "rename one."
    )


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        pytest.param("extra_gone", "ModuleNotFoundError: No module named 'extra_gone'", id="no package"),
        pytest.param(
            "extra_checks.unfinished",
            "AttributeError: module 'extra_checks.unfinished.factors.later' has no attribute 'FACTOR'",
            id="no FACTOR",
        ),
        pytest.param(
            "extra_checks.misnamed",
            "SchemaError: extra_checks.misnamed.factors.other declares 'toy.scale'; its file and folder say "
            "'misnamed.other'.",
            id="another id than its file",
        ),
        pytest.param("extra_checks.raising", "RuntimeError: no licence", id="raises when imported"),
        pytest.param(
            "extra_checks.unbound",
            "SchemaError: extra_checks.unbound has no adapter.py, so unbound.scale cannot be bound; add one.",
            id="no adapter",
        ),
    ],
)
def test_a_broken_plugin_is_named_and_the_others_work(seen: Any, plugin: str, reason: str) -> None:
    assert seen["broken"][plugin] == reason
    assert plugin in seen["stderr"]


@pytest.mark.parametrize(
    ("plugin", "start", "end"),
    [
        pytest.param(
            "extra_checks.unguarded",
            "SchemaError: unguarded.scale: pitfalls names 'weight_differ'; accepts weights_differ, ",
            "Did you mean 'weights_differ'?",
            id="a pitfall",
        ),
        pytest.param(
            "extra_checks.unseen",
            "SchemaError: unseen.scale: required_evidence names 'model shap'; accepts effective-config readback, ",
            "Did you mean 'model shape'?",
            id="evidence",
        ),
    ],
)
def test_a_word_that_nothing_stands_for_is_refused_with_the_nearest(
    seen: Any, plugin: str, start: str, end: str
) -> None:
    assert seen["broken"][plugin].startswith(start)
    assert seen["broken"][plugin].endswith(end)


def test_nothing_else_is_broken(seen: Any) -> None:
    assert sorted(seen["broken"]) == [
        "extra_checks.attention",
        "extra_checks.misnamed",
        "extra_checks.raising",
        "extra_checks.unbound",
        "extra_checks.unfinished",
        "extra_checks.unguarded",
        "extra_checks.unseen",
        "extra_gone",
    ]


# ---- choosing -----------------------------------------------------------------------------------------------------

FACTORS = {name: load_registry().factors["attention.rope_fusion"] for name in ("a.one", "a.two", "b.one")}
THREE = Registry(factors=FACTORS, adapters={})


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        pytest.param("all", 3, id="all"),
        pytest.param("a.one", 1, id="an id"),
        pytest.param(["a.*"], 2, id="a glob"),
        pytest.param(["*.one", "a.one", "a.*"], 3, id="overlapping globs"),
        pytest.param([], 0, id="an empty list"),
    ],
)
def test_factors_are_chosen_by_id_and_glob_each_once(patterns: Any, chosen: int) -> None:
    assert len(THREE.select(patterns)) == chosen


@pytest.mark.parametrize(
    ("pattern", "sentence"),
    [
        pytest.param(
            "a.tow", "no factor matches 'a.tow'; registered: a.one, a.two, b.one. Did you mean 'a.two'?", id="a slip"
        ),
        pytest.param("zzzzzz.*", "no factor matches 'zzzzzz.*'; registered: a.one, a.two, b.one.", id="nothing near"),
        pytest.param("A.ONE", "no factor matches 'A.ONE'; registered: a.one, a.two, b.one.", id="case matters"),
    ],
)
def test_an_unknown_factor_is_refused_with_what_exists_and_the_nearest(pattern: str, sentence: str) -> None:
    with pytest.raises(UnknownFactorError) as refused:
        THREE.select(["a.one", pattern])
    assert str(refused.value) == sentence


def test_an_empty_registry_says_so() -> None:
    with pytest.raises(UnknownFactorError, match=r"^no factor matches '\*'; registered: none\.$"):
        Registry(factors={}, adapters={}).select("all")


@pytest.mark.parametrize(
    ("setting", "factors"),
    [
        ("model.rope.theta", ["attention.rope_fusion"]),
        ("model.norm.epsilon", ["norm.rmsnorm"]),
        ("model.head.dtype", ["logprob.head_dtype"]),
        ("operator.attention.scale", ["attention.kernel", "rollout.attention_backend"]),
        ("weights.digest", ["weights.sync"]),
        ("training.softmax_in_fp32", ["attention.softmax_precision"]),
        ("model.layers", []),
        ("rollout.max_model_len", []),
    ],
)
def test_the_factors_that_a_setting_points_to(setting: str, factors: list[str]) -> None:
    assert [name for name, factor in load_registry().factors.items() if factor.is_about(setting)] == factors
