"""The tree over ranks: the order of ranks alone decides its bits, and its error is that of its fp32 additions."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mismatch_hooks.references.reduction import tree_sum

quick = settings(max_examples=60)
RANKS = st.integers(1, 9)
SEEDS = st.integers(0, 2**32)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


def _partials(ranks: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    scales = 2.0 ** torch.randint(-6, 7, (ranks, 1), generator=drawn)  # parts of unlike size, so that orders differ
    return list((torch.randn(ranks, 24, generator=drawn) * scales).to(dtype))


@quick
@given(RANKS, SEEDS, st.randoms(use_true_random=False))
def test_the_order_in_which_parts_arrive_does_not_show(ranks: int, seed: int, order: Random) -> None:
    partials = _partials(ranks, seed, torch.float32)
    arrived = list(enumerate(partials))
    order.shuffle(arrived)
    by_rank = [part for _, part in sorted(arrived, key=lambda one: one[0])]
    assert torch.equal(tree_sum(by_rank), tree_sum(partials))


def test_the_order_of_ranks_does_show() -> None:
    """Otherwise the property above would hold of any sum."""
    small = torch.tensor(2.0**-24)
    one, none = torch.tensor(1.0), torch.tensor(0.0)
    assert tree_sum([one, small, small, none]) != tree_sum([one, none, small, small])


@quick
@given(RANKS, SEEDS, DTYPES)
def test_the_sum_is_that_of_float64_to_its_fp32_additions_and_one_rounding(
    ranks: int, seed: int, dtype: torch.dtype
) -> None:
    partials = _partials(ranks, seed, dtype)
    exact = torch.stack(partials).double().sum(0)
    size = torch.stack(partials).double().abs().sum(0)
    levels = (ranks - 1).bit_length()
    bound = size * levels * 2.0**-23 + exact.abs() * torch.finfo(dtype).eps
    assert bool(((tree_sum(partials).double() - exact).abs() <= bound + 2.0**-24).all())


@quick
@given(SEEDS)
def test_two_ranks_may_be_added_in_either_order(seed: int) -> None:
    partials = _partials(2, seed)
    assert torch.equal(tree_sum(partials), tree_sum(partials[::-1]))


def test_the_parts_are_not_written_to() -> None:
    partials = _partials(4, 0, torch.float32)
    before = [part.clone() for part in partials]
    tree_sum(partials)
    assert all(torch.equal(part, kept) for part, kept in zip(partials, before, strict=True))


@pytest.mark.parametrize("partials", [[], [torch.zeros(2), torch.zeros(3)], [torch.zeros(2), torch.zeros(2).half()]])
def test_parts_that_cannot_be_of_one_tensor_are_refused(partials: list[torch.Tensor]) -> None:
    with pytest.raises(ValueError, match="accepts one or more of one shape and dtype"):
        tree_sum(partials)
