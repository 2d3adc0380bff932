"""Importing the library needs no engine, loads nothing heavy and leaves one name for each file."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

HEAVY = ("torch", "vllm", "megatron", "wandb", "numpy", "pydantic")

IMPORT_WHAT_FOLLOWS = """
import pkgutil, importlib, sys
sys.modules.update(dict.fromkeys({blocked!r}))
for folder in {folders!r}:
    package = importlib.import_module(folder)
    for module in pkgutil.walk_packages(getattr(package, "__path__", []), folder + "."):
        importlib.import_module(module.name)
        print(module.name)
"""


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_import_works_where_nothing_heavy_is_installed() -> None:
    done = run_python(f"import sys; sys.modules.update(dict.fromkeys({HEAVY!r})); import mismatch_hooks")
    assert (done.returncode, done.stderr) == (0, "")


def test_import_loads_nothing_heavy_where_everything_is_installed() -> None:
    done = run_python(f"import sys, mismatch_hooks; print([name for name in {HEAVY!r} if name in sys.modules])")
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")


def test_every_core_module_imports_without_an_engine_and_without_wandb() -> None:
    core = [
        f"mismatch_hooks.{name}" for name in ("schema", "references", "model_meta", "pipeline", "sinks", "live", "cli")
    ]
    blocked = ("vllm", "megatron", "transformer_engine", "flashinfer", "wandb")
    done = run_python(IMPORT_WHAT_FOLLOWS.format(blocked=blocked, folders=core))
    assert done.returncode == 0, done.stderr
    assert {name.split(".")[1] for name in done.stdout.split()} == {name.split(".")[1] for name in core} - {"cli"}


def test_engines_and_operator_checks_import_without_their_engine() -> None:
    outer = ["mismatch_hooks.integrations", "mismatch_hooks.operator_checks"]
    blocked = ("vllm", "megatron", "transformer_engine", "flashinfer")
    done = run_python(IMPORT_WHAT_FOLLOWS.format(blocked=blocked, folders=outer))
    assert done.returncode == 0, done.stderr
    assert "mismatch_hooks.integrations.vllm" in done.stdout.split()


@pytest.mark.parametrize("name", ["integrations", "operator_checks"])
def test_an_outer_folder_refuses_its_bare_name(name: str) -> None:
    done = run_python(f"import {name}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"ImportError: import mismatch_hooks.{name}, not {name}: one file must not be two modules"
    )
