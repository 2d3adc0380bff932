"""A product given no fewer rows than a native kernel needs for its bits not to depend on how many there are.

Seen on a CPU: a row of vLLM's and megatron-core's native bf16 products has the same bits with 4, 5, … or 200 rows, and
now and then others when it comes alone or with one or two more, where a kernel for vectors runs. That is observed and
not constructed, for one library on one processor; fixed tiles (``linear``) are what holds by construction.
"""

# R rows, D inputs
from collections.abc import Callable

import torch
from torch import Tensor

FEWEST_ROWS = 4


def with_enough_rows(product: Callable[[Tensor], Tensor], states_RD: Tensor) -> Tensor:
    """Return ``product(states)``, computed with rows of zeros behind it where there are fewer than ``FEWEST_ROWS``.

    Args:
        product: from ``[R, ..., D]`` to ``[R, ..., O]``, row by row.
        states_RD: ``[R, ..., D]``; every leading size but the first counts into the rows as well.

    Differentiable where the product is.
    """
    per_row = states_RD[:1].numel() // states_RD.shape[-1] if len(states_RD) else 1
    missing = -(-(FEWEST_ROWS - len(states_RD) * per_row) // max(per_row, 1))
    if missing <= 0:
        return product(states_RD)
    filled = torch.cat((states_RD, states_RD.new_zeros(missing, *states_RD.shape[1:])))
    return product(filled)[: len(states_RD)]
