"""The wheel holds one top-level name, every outer module once, the data files and no test."""

import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OUTER = ("integrations", "operator_checks")
SHIPPED = ("mismatch_hooks", *OUTER, "pyproject.toml", "setup.py", "README.md")


def wheel_of(checkout: Path) -> list[str]:
    """Names in the wheel that this checkout builds: no network, no isolation, no left-over build folder."""
    out = checkout / "wheel"
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*command, "--wheel-dir", out, checkout], check=True, timeout=120)
    (wheel,) = out.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        return archive.namelist()


def copy_checkout(to: Path) -> Path:
    for name in SHIPPED:
        source, target = ROOT / name, to / name
        if source.is_dir():
            shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, target)
    return to


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return wheel_of(copy_checkout(tmp_path_factory.mktemp("checkout")))


def test_both_links_are_present() -> None:
    assert {name: (ROOT / "mismatch_hooks" / name).readlink() for name in OUTER} == {
        name: Path("..", name) for name in OUTER
    }


def test_wheel_has_one_top_level_name(wheel: list[str]) -> None:
    tops = {name.split("/")[0] for name in wheel if ".dist-info/" not in name}
    assert tops == {"mismatch_hooks"}


def test_wheel_has_every_module_once(wheel: list[str]) -> None:
    inside = (ROOT / "mismatch_hooks").rglob("*.py")  # rglob follows no link
    outside = (file for top in OUTER for file in (ROOT / top).rglob("*.py") if "tests" not in file.parts)
    expected = [file.relative_to(ROOT).as_posix() for file in inside]
    expected += [f"mismatch_hooks/{file.relative_to(ROOT).as_posix()}" for file in outside]
    assert sorted(name for name in wheel if name.endswith(".py")) == sorted(expected)


def test_wheel_has_the_data_files(wheel: list[str]) -> None:
    suffixes = (".yaml", ".json", ".html", "/README.md", "/py.typed")
    found = [file for top in ("mismatch_hooks", *OUTER) for file in (ROOT / top).rglob("*") if file.is_file()]
    data = {file.relative_to(ROOT).as_posix() for file in found if file.as_posix().endswith(suffixes)}
    expected = {name if name.startswith("mismatch_hooks/") else f"mismatch_hooks/{name}" for name in data}
    assert {name for name in wheel if f"/{name}".endswith(suffixes)} == expected
    assert "mismatch_hooks/py.typed" in expected


def test_wheel_has_no_tests(wheel: list[str]) -> None:
    assert [name for name in wheel if "/tests/" in name or name.split("/")[-1].startswith("test_")] == []


def test_a_checkout_that_lost_its_links_builds_the_same_wheel(wheel: list[str], tmp_path: Path) -> None:
    checkout = copy_checkout(tmp_path)
    for name in OUTER:
        (checkout / "mismatch_hooks" / name).unlink()
    assert sorted(wheel_of(checkout)) == sorted(wheel)


def test_installed_entry_points_name_importable_objects() -> None:
    (command,) = entry_points(group="console_scripts", name="mismatch-hooks")
    assert command.value == "mismatch_hooks.cli:main"
    assert callable(command.load())
    (builtin,) = entry_points(group="mismatch_hooks.operator_checks", name="builtin")
    assert builtin.load().__name__ == "mismatch_hooks.operator_checks"
