"""Two tensor-parallel ranks: the columns of each have the bits of one rank, and gradients are added over both."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_hooks.references.linear import linear
from tests.two_ranks import run_two_ranks

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
    printed = run_two_ranks([str(SCRIPT.resolve())], str(store))
    return [
        {name: {key: torch.tensor(values) for key, values in one.items()} for name, one in rank.items()}
        for rank in printed
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
