"""Two tensor-parallel ranks: the columns of each have the bits of one rank, and gradients are added over both."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_hooks.references.linear import linear

pytestmark = pytest.mark.engine

SCRIPT = Path(__file__).with_name("two_ranks.py")


def _script() -> Any:
    found = importlib.util.spec_from_file_location("two_ranks", SCRIPT)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, Tensor]]]:
    pytest.importorskip("megatron.core", reason="megatron-core is not installed")
    store = tmp_path_factory.mktemp("store") / "store"
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(SCRIPT), str(rank), str(store)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        done = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, done, strict=True):
        assert process.returncode == 0, errors
    return [
        {
            name: {key: torch.tensor(values) for key, values in one.items()}
            for name, one in json.loads(output.splitlines()[-1]).items()
        }
        for output, _ in done
    ]


def test_the_columns_of_each_rank_have_the_bits_that_one_rank_gives_them(ranks: Any) -> None:
    script = _script()
    states = script.drawn(script.ROWS, script.INPUTS, seed=0)
    weight = script.drawn(script.OUTPUTS, script.INPUTS, seed=1)
    whole = linear(states, weight, dtype=torch.bfloat16).float()
    assert torch.equal(torch.cat([rank["bound"]["product"] for rank in ranks], -1), whole)


def test_the_gradient_of_the_input_is_the_sum_over_ranks_as_the_native_product_makes_it(ranks: Any) -> None:
    """The bound, of the largest value: bf16 rounds each rank's part, their sum, and the slopes before them (2⁻⁹ each).

    What one rank alone would give misses by about half of that value.
    """
    first, second = ranks
    assert torch.equal(first["bound"]["for_states"], second["bound"]["for_states"])
    for rank in ranks:
        for key in ("for_states", "for_weight"):
            native, bound = rank["native"][key], rank["bound"][key]
            assert bool(((native - bound).abs() <= 2.0**-6 * native.abs().max()).all())
