"""What ``make`` does before it builds anything, with stand-ins for the system's package manager and user id."""

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NO_COMPILER = "CXX=/nowhere/c++"  # the one probe that can be made to fail without touching the system
LOCK_DIGEST = hashlib.sha256((ROOT / "requirements-cpu.txt").read_bytes()).hexdigest()
NO_PYTHON = "FIND_PYTHON=true"  # a search that prints nothing
UNREACHABLE = "http://127.0.0.1:9/simple"


def make(*arguments: str, path: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``make`` as from a shell: not as a part of the make that runs these tests."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    if path is not None:
        kept["PATH"] = f"{path}:{kept['PATH']}"
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=kept | environment, capture_output=True, text=True, timeout=200, stdin=subprocess.DEVNULL
    )


def stand_in(folder: Path, name: str, script: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/bash\n{script}\n", encoding="utf-8")
    program.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder for PATH whose apt-get writes its arguments to ``calls`` and installs nothing; the user is root."""
    folder = tmp_path / "programs"
    folder.mkdir()
    stand_in(folder, "apt-get", f'echo "$*" >> {tmp_path}/calls')
    stand_in(folder, "id", "echo 0")
    return folder


def calls(programs: Path) -> list[str]:
    log = programs.parent / "calls"
    return log.read_text(encoding="utf-8").splitlines() if log.exists() else []


def test_nothing_is_installed_where_nothing_is_missing(programs: Path) -> None:
    done = make("system", path=programs)
    assert (done.returncode, done.stdout, done.stderr, calls(programs)) == (0, "", "", [])


def test_root_installs_only_what_is_missing_and_is_told_when_that_did_not_help(programs: Path) -> None:
    done = make("system", NO_COMPILER, path=programs)
    assert done.returncode == 2
    assert calls(programs) == ["update -q", "install -y --no-install-recommends g++"]
    assert "make: still missing after 'apt-get install -y --no-install-recommends g++': g++." in done.stderr


def test_another_user_is_given_the_one_line_to_run_and_nothing_is_begun(programs: Path, tmp_path: Path) -> None:
    stand_in(programs, "id", "echo 1000")
    done = make("setup", NO_COMPILER, f"VENV={tmp_path}/environment", path=programs)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "make: missing: g++; run this, then make again: "
        "sudo sh -c 'apt-get update && apt-get install -y --no-install-recommends g++'"
    )
    assert calls(programs) == []
    assert not (tmp_path / "environment").exists()


def test_another_interpreter_is_refused_before_anything_else(programs: Path, tmp_path: Path) -> None:
    stand_in(programs, "python-of-old", "exit 1")
    done = make("setup", "PYTHON=python-of-old", f"VENV={tmp_path}/environment", path=programs)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "make: PYTHON=python-of-old is not a Python 3.11: name one, or leave it out."
    )
    assert not (tmp_path / "environment").exists()


def test_python_itself_is_installed_where_there_is_none(programs: Path) -> None:
    stand_in(programs, "apt-cache", "echo python3.11-venv - Interactive high-level object-oriented language")
    make("system", NO_PYTHON, path=programs)
    assert calls(programs) == ["update -q", "install -y --no-install-recommends python3.11-venv python3.11-dev"]


def test_a_system_whose_packages_have_no_python_311_is_told_where_to_get_one(programs: Path) -> None:
    stand_in(programs, "apt-cache", "exit 0")
    done = make("system", NO_PYTHON, path=programs)
    assert done.returncode == 2
    assert "make: this system's packages have no Python 3.11" in done.stderr
    assert calls(programs) == ["update -q"]


def test_headers_of_an_interpreter_that_the_system_did_not_bring_are_not_looked_for_in_its_packages(
    programs: Path,
) -> None:
    stand_in(programs, "python-without-headers", '[[ "$2" != *Python.h* ]]')
    done = make("system", "FIND_PYTHON=echo python-without-headers", path=programs)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == (
        "make: python-without-headers lacks ensurepip or Python.h: name a Python 3.11 that has both: make PYTHON=PATH."
    )
    assert calls(programs) == []


def test_another_processor_is_refused(programs: Path) -> None:
    stand_in(programs, "uname", "echo Linux aarch64")
    done = make("system", path=programs)
    assert done.returncode == 2
    assert done.stderr.splitlines()[0] == ("make: this is Linux aarch64, and the pinned wheels are for Linux x86_64.")


def test_a_folder_that_make_did_not_make_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    done = make("setup", f"VENV={tmp_path}")
    assert done.returncode == 2
    assert f"make: {tmp_path} is not empty and was not made by this Makefile" in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_an_index_that_cannot_be_reached_costs_seconds_and_a_half_made_environment_is_begun_again(
    tmp_path: Path,
) -> None:
    environment = tmp_path / "environment"
    left_over = environment / "lib" / "half" / "a-package.py"
    left_over.parent.mkdir(parents=True)
    left_over.touch()
    (environment / ".made-by-make").touch()
    start = time.monotonic()
    done = make(
        "setup",
        f"VENV={environment}",
        f"TORCH_CPU_INDEX={UNREACHABLE}",
        PIP_CONFIG_FILE="/dev/null",
        PIP_INDEX_URL=UNREACHABLE,
        PIP_FIND_LINKS="",
        PIP_EXTRA_INDEX_URL="",
    )
    assert done.returncode == 2
    assert (
        "make: no torch==2.13.0+cpu: neither the configured pip nor http://127.0.0.1:9/simple gave it;" in done.stderr
    )
    assert time.monotonic() - start < 60
    assert not left_over.exists()
    assert not (environment / ".built").exists()


def finished_environment(folder: Path, *, checkout: Path, lock: str) -> Path:
    """An environment as ``make setup`` leaves it, with nothing installed in it."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / ".made-by-make").touch()
    (folder / ".built").write_text(f"{checkout} {lock}\n", encoding="utf-8")
    (folder / ".installed").touch()
    return folder


@pytest.mark.parametrize(
    ("checkout", "lock", "returncode"),
    [
        pytest.param(ROOT, LOCK_DIGEST, 0, id="finished: nothing to do"),
        pytest.param(Path("/elsewhere"), LOCK_DIGEST, 1, id="the checkout was moved"),
        pytest.param(ROOT, "0" * 64, 1, id="the lock was changed"),
    ],
)
def test_an_environment_is_kept_only_for_the_lock_and_the_folder_it_was_made_for(
    checkout: Path, lock: str, returncode: int, tmp_path: Path
) -> None:
    environment = finished_environment(tmp_path / "environment", checkout=checkout, lock=lock)
    assert make("--question", "setup", f"VENV={environment}").returncode == returncode


def test_an_environment_whose_interpreter_is_gone_is_made_anew(tmp_path: Path) -> None:
    environment = finished_environment(tmp_path / "environment", checkout=ROOT, lock=LOCK_DIGEST)
    (environment / "bin" / "python").unlink()
    (environment / "bin" / "python").symlink_to("/nowhere/python3.11")
    assert make("--question", "setup", f"VENV={environment}").returncode == 1


def test_ci_runs_make_test_and_nothing_of_its_own() -> None:
    assert (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()[1:] == [
        "set -euo pipefail",
        'cd "$(dirname "$0")/.."',
        "make test",
    ]
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
