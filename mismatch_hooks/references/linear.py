"""Linear layers in fp32 by fixed tiles: a value has the same bits however the work around it was cut up.

The bits of a matrix product depend on its shape: on a CPU an fp32 product of one to three rows differs from the same
rows of a larger one in nearly every value. Here every product is one of 16 rows with 64 columns, whatever there is to
do, and the last ones are filled up with zeros. So nothing else moves a value's bits: not how many rows come with it,
nor which, nor how many columns this rank holds, nor the order in which an engine fuses them.
"""

# T rows, R rows in whole tiles, D inputs, O outputs, C tiles of columns
from typing import Any

import torch
from torch import Tensor

TILE_ROWS = 16
TILE_COLUMNS = 64
# Columns of the weight that are held in fp32 at once: 2.4 MB at 576 inputs, where a whole head would be 113 MB.
_COLUMNS_AT_ONCE = 1024


def linear(states_D: Tensor, weight_OD: Tensor, bias_O: Tensor | None = None, *, dtype: torch.dtype) -> Tensor:
    """Return ``states @ weight.T + bias`` ``[..., O]`` in ``dtype``, accumulated in fp32 and rounded once.

    Args:
        states_D: ``[..., D]``; below fp32 it is computed in fp32, fp64 stays fp64.
        weight_OD: ``[O, D]``, any floating dtype and layout.
        bias_O: ``[O]``, added before the rounding.
        dtype: of the result; the model's for the layers, fp32 for an output head.

    Differentiable in all three; a gradient is any correct one, in its tensor's dtype, and promises no bits. Nothing is
    kept between calls, so a weight that was written to takes part at the next one.

    On a GPU fp32 products are fp32 only while TF32 is off.
    """
    product: Tensor = _Linear.apply(states_D, weight_OD, bias_O, dtype)  # type: ignore[no-untyped-call]
    return product


class _Linear(torch.autograd.Function):
    """Keeps the states and the weight in their own dtype for the backward, instead of every fp32 tile."""

    @staticmethod
    def forward(states_D: Tensor, weight_OD: Tensor, bias_O: Tensor | None, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(states_D.dtype, torch.float32)
        product_TO = _multiply(states_D.reshape(-1, states_D.shape[-1]).to(wide), weight_OD)
        if bias_O is not None:
            product_TO += bias_O.to(wide)
        return product_TO.to(dtype).view(*states_D.shape[:-1], len(weight_OD))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        states_D, weight_OD, bias_O, _ = inputs
        ctx.save_for_backward(states_D, weight_OD)
        ctx.bias_dtype = None if bias_O is None else bias_O.dtype

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        states_D, weight_OD = ctx.saved_tensors
        wide = torch.promote_types(states_D.dtype, torch.float32)
        slope_TO = slopes[0].reshape(-1, len(weight_OD)).to(wide)
        rows_TD = states_D.reshape(-1, states_D.shape[-1]).to(wide)
        for_states, for_weight, for_bias, _ = ctx.needs_input_grad
        return (
            (slope_TO @ weight_OD.to(wide)).to(states_D.dtype).view_as(states_D) if for_states else None,
            (slope_TO.T @ rows_TD).to(weight_OD.dtype) if for_weight else None,
            slope_TO.sum(0).to(ctx.bias_dtype) if for_bias else None,
            None,
        )


def _multiply(rows_TD: Tensor, weight_OD: Tensor) -> Tensor:
    count, outputs = len(rows_TD), len(weight_OD)
    # Copied, which also lays them out one way: the layout of an operand decides how a product reads it.
    rows_RD = rows_TD.new_zeros(count + -count % TILE_ROWS, rows_TD.shape[1])
    rows_RD[:count] = rows_TD
    product = rows_RD.new_empty(len(rows_RD), outputs + -outputs % TILE_COLUMNS)
    held_OD = rows_RD.new_empty(min(product.shape[1], _COLUMNS_AT_ONCE), rows_RD.shape[1])
    for first in range(0, outputs, _COLUMNS_AT_ONCE):
        tiles_CDW = _tiles(weight_OD[first : first + _COLUMNS_AT_ONCE], held_OD)
        part = product[:, first : first + _COLUMNS_AT_ONCE].unflatten(1, (len(tiles_CDW), TILE_COLUMNS))
        for row in range(0, len(rows_RD), TILE_ROWS):
            tile = rows_RD[row : row + TILE_ROWS].expand(len(tiles_CDW), -1, -1)
            part[row : row + TILE_ROWS] = torch.bmm(tile, tiles_CDW).transpose(0, 1)
    return product[:count, :outputs].contiguous()


def _tiles(weight_OD: Tensor, held_OD: Tensor) -> Tensor:
    outputs = len(weight_OD)
    held_OD = held_OD[: outputs + -outputs % TILE_COLUMNS]
    held_OD[:outputs] = weight_OD
    held_OD[outputs:] = 0.0
    return held_OD.view(-1, TILE_COLUMNS, held_OD.shape[1]).transpose(1, 2)
