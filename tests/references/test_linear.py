"""The linear reference: right to a stated bound, rounded once, and the same bits however the work was cut up.

The chain for one linear: a row alone = the row in any batch, hence rollout decode = rollout prefill; a column alone =
the column among any others, hence one rank = several, and one engine's fused layout = the other's.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from mismatch_hooks.references import linear as reference
from mismatch_hooks.references.linear import TILE_COLUMNS, TILE_ROWS, linear

quick = settings(max_examples=40)
ROWS = st.integers(1, 2 * TILE_ROWS + 9)
INPUTS = st.sampled_from([1, 7, 64, 130, 576])
OUTPUTS = st.sampled_from([1, 31, 64, 80, 200])
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SEEDS = st.integers(0, 2**32)


def _drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _fp32(states: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    # Not rounded: a rounding to the model's dtype would hide most differences.
    return linear(states, weight, bias, dtype=torch.float32)


# ---- right --------------------------------------------------------------------------------------------------------


@quick
@given(ROWS, INPUTS, OUTPUTS, SEEDS)
def test_a_product_is_that_of_float64_to_the_error_of_its_fp32_operations(
    rows: int, inputs: int, outputs: int, seed: int
) -> None:
    """The bound: ``(n + 2) u Σ |x w|``, u = 2⁻²⁴: n products and n − 1 sums, in any order, and one for the bias."""
    states, weight, bias = _drawn(rows, inputs, seed=seed), _drawn(outputs, inputs, seed=seed + 1), _drawn(outputs)
    exact = states.double() @ weight.double().T + bias
    size = states.double().abs() @ weight.double().abs().T + bias.abs()
    assert bool(((_fp32(states, weight, bias) - exact).abs() <= (inputs + 2) * 2.0**-24 * size).all())


def test_low_precision_is_accumulated_in_fp32_and_rounded_once_after_the_bias() -> None:
    states, weight = _drawn(5, 96, dtype=torch.bfloat16), _drawn(80, 96, dtype=torch.bfloat16, seed=1)
    bias = _drawn(80, dtype=torch.bfloat16, seed=2)
    once = linear(states, weight, bias, dtype=torch.bfloat16)
    assert once.dtype is torch.bfloat16
    assert torch.equal(once, _fp32(states, weight, bias).bfloat16())
    assert torch.equal(_fp32(states, weight, bias), _fp32(states.float(), weight.float(), bias.float()))
    twice = linear(states, weight, dtype=torch.bfloat16) + bias
    assert 0 < int((once != twice).sum()) < once.numel()


def test_small_integers_are_exact_in_every_column_and_row() -> None:
    states, weight = torch.arange(17.0 * 3).view(17, 3), torch.arange(70.0 * 3).view(70, 3)
    assert torch.equal(_fp32(states, weight, torch.ones(70)), states @ weight.T + 1)


def test_the_shape_in_front_is_kept_and_no_rows_give_no_rows() -> None:
    weight = _drawn(10, 6)
    assert _fp32(_drawn(2, 3, 6), weight).shape == (2, 3, 10)
    assert _fp32(_drawn(6), weight).shape == (10,)
    assert _fp32(_drawn(0, 6), weight).shape == (0, 10)


# ---- the same bits ------------------------------------------------------------------------------------------------


def test_an_fp32_product_of_few_rows_has_other_bits_than_the_same_rows_of_a_larger_one() -> None:
    """Why the tile is fixed. A host that passes here may multiply as it likes, and the trap's words go."""
    states, weight = _drawn(16, 576), _drawn(960, 576, seed=1)
    alone = torch.cat([functional.linear(states[row : row + 1], weight) for row in range(16)])
    assert not torch.equal(alone, functional.linear(states, weight))


@quick
@given(ROWS, INPUTS, OUTPUTS, DTYPES, SEEDS)
def test_a_row_does_not_depend_on_its_neighbours_their_order_or_their_number(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype, seed: int
) -> None:
    states = _drawn(rows, inputs, dtype=dtype, seed=seed)
    weight = _drawn(outputs, inputs, dtype=dtype, seed=seed + 1)
    whole = _fp32(states, weight)
    assert torch.equal(torch.cat([_fp32(states[row : row + 1], weight) for row in range(rows)]), whole)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(_fp32(states[order], weight), whole[order])
    padded = torch.cat((states, torch.full((7, inputs), 1e3, dtype=dtype)))
    assert torch.equal(_fp32(padded, weight)[:rows], whole)


@quick
@given(ROWS, st.lists(st.integers(1, 20), min_size=1, max_size=8), SEEDS)
def test_a_prefill_in_pieces_has_the_bits_of_one_piece(rows: int, pieces: list[int], seed: int) -> None:
    states, weight = _drawn(rows, 130, seed=seed), _drawn(80, 130, seed=seed + 1)
    pieces = [*pieces, rows]
    starts = [min(sum(pieces[:nth]), rows) for nth in range(len(pieces) + 1)]
    cut = [_fp32(states[start:stop], weight) for start, stop in zip(starts, starts[1:], strict=False)]
    assert torch.equal(torch.cat(cut), _fp32(states, weight))


@quick
@given(ROWS, INPUTS, OUTPUTS, SEEDS)
def test_a_column_does_not_depend_on_its_neighbours_their_order_or_their_number(
    rows: int, inputs: int, outputs: int, seed: int
) -> None:
    """vLLM holds [q; k; v], megatron-core the same rows by group; and each rank of several holds a part of them."""
    states, weight = _drawn(rows, inputs, seed=seed), _drawn(outputs, inputs, seed=seed + 1)
    whole = _fp32(states, weight)
    order = torch.randperm(outputs, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(_fp32(states, weight[order]), whole[:, order])
    cut = [_fp32(states, part) for part in weight.chunk(4)]
    assert torch.equal(torch.cat(cut, -1), whole)


def test_how_many_columns_are_held_at_once_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    states, weight = _drawn(37, 130), _drawn(1000, 130, seed=1)
    whole = _fp32(states, weight)
    monkeypatch.setattr(reference, "_COLUMNS_AT_ONCE", 2 * TILE_COLUMNS)
    assert torch.equal(_fp32(states, weight), whole)


def test_how_the_operands_lie_in_memory_changes_no_bit() -> None:
    states, weight = _drawn(20, 576), _drawn(200, 576, seed=1)
    whole = _fp32(states, weight)
    across = weight.T.contiguous().T
    inside = torch.zeros(20, 600)[:, 5:581].copy_(states)
    apart = torch.zeros(200 * 576 + 3)[3:].view(200, 576).copy_(weight)  # 12 bytes off every vector boundary
    assert (across.is_contiguous(), inside.is_contiguous()) == (False, False)
    assert torch.equal(_fp32(inside, across), whole)
    assert torch.equal(_fp32(states, apart), whole)


def test_megatrons_layout_and_vllms_layout_have_the_same_bits() -> None:
    """[sequence, batch, width] against flat rows of one sequence after the other."""
    states, weight = _drawn(11, 4, 96, dtype=torch.bfloat16), _drawn(80, 96, dtype=torch.bfloat16, seed=1)
    training = _fp32(states, weight)
    rollout = _fp32(states.transpose(0, 1).reshape(-1, 96), weight)
    assert torch.equal(training.transpose(0, 1).reshape(-1, 80), rollout)


def test_the_number_of_threads_changes_no_bit() -> None:
    states, weight, threads, seen = _drawn(97, 576), _drawn(300, 576, seed=1), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            seen.append(_fp32(states, weight))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, seen[0]) for one in seen)


def test_every_product_is_one_of_the_same_two_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """What makes it hold by construction, and not only for the shapes that were tried above."""
    shapes, multiply = set(), torch.bmm

    def bmm(left: Tensor, right: Tensor) -> Tensor:
        shapes.add((left.shape[1:], right.shape[1:], left.stride()[1:], right.stride()[1:]))
        return multiply(left, right)

    monkeypatch.setattr(torch, "bmm", bmm)
    for rows, outputs in ((1, 1), (3, 64), (40, 200), (16, 9000)):
        _fp32(_drawn(rows, 24), _drawn(outputs, 24))
        _fp32(_drawn(24, rows).T, _drawn(24, outputs).T)  # and however the operands lie
    assert shapes == {((TILE_ROWS, 24), (24, TILE_COLUMNS), (24, 1), (1, 24))}


def test_a_weight_that_was_written_to_takes_part_at_the_next_call() -> None:
    states, weight = _drawn(3, 24), _drawn(5, 24, seed=1)
    before = _fp32(states, weight)
    weight.data.mul_(2)  # as a loader writes, behind the version counter
    assert torch.equal(_fp32(states, weight), 2 * before)


# ---- gradients ----------------------------------------------------------------------------------------------------


def test_gradients_are_those_of_finite_differences() -> None:
    states, weight, bias = _drawn(2, 9, 5), _drawn(70, 5, seed=1), _drawn(70, seed=2)
    inputs = [part.double().requires_grad_() for part in (states, weight, bias)]
    assert torch.autograd.gradcheck(lambda x, w, b: linear(x, w, b, dtype=torch.float64), inputs)


def test_gradients_keep_the_dtype_of_their_tensors_and_are_made_only_where_they_are_needed() -> None:
    states, weight = _drawn(3, 24, dtype=torch.bfloat16).requires_grad_(), _drawn(5, 24, dtype=torch.bfloat16, seed=1)
    linear(states, weight, dtype=torch.float32).sum().backward()
    assert states.grad is not None
    assert states.grad.dtype is torch.bfloat16
    assert torch.equal(states.grad, weight.float().sum(0).bfloat16().expand(3, 24))
    assert weight.grad is None
