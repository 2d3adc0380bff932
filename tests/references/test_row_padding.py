"""A product gets four rows or more, and gives back those that were there."""

import pytest
import torch

from mismatch_hooks.references.row_padding import FEWEST_ROWS, with_enough_rows


@pytest.mark.parametrize(
    "shape", [(1, 8), (3, 8), (4, 8), (9, 8), (1, 1, 8), (1, 3, 8), (3, 1, 8), (2, 2, 8), (1, 5, 8)]
)
def test_a_product_gets_enough_rows_and_the_rest_is_left_out(shape: tuple[int, ...]) -> None:
    seen = []

    def product(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows.shape)
        return rows * 2.0

    states = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    assert torch.equal(with_enough_rows(product, states), states * 2.0)
    (given,) = seen
    assert given[:-1].numel() >= FEWEST_ROWS and given[1:] == states.shape[1:]
    assert given == states.shape or states.shape[:-1].numel() < FEWEST_ROWS


def test_no_row_stays_no_row() -> None:
    assert with_enough_rows(lambda rows: rows, torch.empty(0, 8)).shape == (0, 8)


def test_gradients_are_those_of_the_rows_that_were_there() -> None:
    states = torch.randn(2, 8, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with_enough_rows(lambda rows: rows.square(), states).sum().backward()
    assert torch.equal(states.grad, 2 * states.detach())  # type: ignore[arg-type]
