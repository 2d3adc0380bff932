"""The tutorials' code is written to disk as printed, installed and run, and their output is the real one.

A block's info string says what it is: ```` ```python PATH ```` is a file, ```` ```sh layout ```` is run in the new
folder, and ```` ```console ```` is a command with its output.
"""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(r"^```(?P<language>\w+)(?: (?P<name>\S+))?\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tutorial:
    """A tutorial whose distribution is built and installed.

    Attributes:
        source: the folder that its blocks made.
        site: where it is installed.
        shown: each command with the output that is printed in the text.
    """

    source: Path
    site: Path
    shown: dict[str, str]

    def run(self, *command: str) -> str:
        """Return what a command prints where this distribution is installed."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.site),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "COLUMNS": "120",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # they take as long to load as the tests to run
        }
        done = subprocess.run(
            command, cwd=self.source, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=["add-a-kernel-factor", "add-a-communication-factor"])
def tutorial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tutorial:
    source, site = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("site")
    blocks = list(_BLOCK.finditer((DOCS / f"{request.param}.md").read_text(encoding="utf-8")))
    layout, *rest = (block for block in blocks if block["name"] == "layout")
    assert not rest
    subprocess.run(["bash", "-euc", layout["text"]], cwd=source, check=True)
    for block in blocks:
        if block["language"] in ("python", "toml"):
            (source / block["name"]).write_text(block["text"], encoding="utf-8")
    install = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    # A copy: setuptools leaves its build folder beside the sources, where the tests would find the modules twice.
    subprocess.run(
        [*install, "--no-index", "--no-build-isolation", "--target", site, source], check=True, capture_output=True
    )
    shown = (block["text"].removeprefix("$ ").partition("\n") for block in blocks if block["language"] == "console")
    return Tutorial(source=source, site=site, shown={command: output for command, _, output in shown})


def test_its_own_tests_pass(tutorial: Tutorial) -> None:
    said = tutorial.run(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests")
    assert re.search(r"^\d+ passed in ", said, re.MULTILINE)


def test_every_command_prints_what_the_text_shows(tutorial: Tutorial) -> None:
    printed = {command: _trimmed(tutorial.run(*command.split())) for command in tutorial.shown}
    assert printed == {command: _trimmed(output) for command, output in tutorial.shown.items()}
    assert [command.split()[1] for command in printed] == ["list", "plan"]


def test_its_files_are_clean(tutorial: Tutorial) -> None:
    tutorial.run("ruff", "check", "--isolated", "--line-length", "120", "--extend-select", "B,E,UP,W", ".")
    tutorial.run("ruff", "format", "--isolated", "--line-length", "120", "--check", "--exclude", "build", ".")


def _trimmed(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize(
    ("package", "file", "called"),
    [
        ("vllm", "model_executor/layers/linear.py", "= tensor_model_parallel_all_reduce(output_parallel)"),
        ("vllm", "model_executor/layers/linear.py", "= tensor_model_parallel_all_gather(output_parallel)"),
        ("vllm", "model_executor/custom_op.py", "return self._forward_method(*args, **kwargs)"),
        ("megatron", "core/tensor_parallel/layers.py", "= reduce_from_tensor_model_parallel_region(output_parallel, "),
        ("megatron", "core/tensor_parallel/layers.py", "= gather_from_tensor_model_parallel_region(output_parallel, "),
        ("megatron", "core/transformer/mlp.py", "= self.activation_func(intermediate_parallel)"),
    ],
)
def test_the_engines_call_what_the_adapters_replace(package: str, file: str, called: str) -> None:
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    places = [Path(place) / file for place in found.submodule_search_locations]
    assert called in next(place for place in places if place.is_file()).read_text(encoding="utf-8")
