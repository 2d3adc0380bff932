"""The sum of what every tensor-parallel rank holds, in an order that is the rank numbers and nothing else.

A library's all-reduce chooses its order by algorithm, message size and topology, and may round at every step. Here the
partials are gathered, which moves bits and adds nothing, and every rank makes the same local sum: of four ranks
``(p0 + p1) + (p2 + p3)``, in fp32, rounded once. Which rank's part arrived first cannot show.

Two engines get the same bits from it where both cut the product at the same places; partials of another number of ranks
differ before anything is added.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def tree_sum(partials: Sequence[Tensor]) -> Tensor:
    """Return the sum over ranks, added by neighbouring pairs of the list and rounded once.

    Args:
        partials: one tensor a rank, in the order of ranks; all of one shape and floating dtype.

    Returns:
        The shape and dtype of one partial; the sum is made in fp32, or in fp64 where the partials are.

    Raises:
        ValueError: there is no partial, or two differ in shape or dtype.
    """
    if len({(partial.shape, partial.dtype) for partial in partials}) != 1:
        found = [f"{list(partial.shape)} {partial.dtype}" for partial in partials]
        raise ValueError(f"partials: got {found}; accepts one or more of one shape and dtype.")
    stored = partials[0].dtype
    terms = [partial.to(torch.promote_types(stored, torch.float32)) for partial in partials]
    while len(terms) > 1:
        pairs = [terms[first : first + 2] for first in range(0, len(terms), 2)]
        terms = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return terms[0].to(stored)
