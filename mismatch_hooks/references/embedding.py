"""Embedding lookup: the table's own bits, not scaled and not cast."""

# T tokens, V rows of the table, D model
import torch
from torch import Tensor


def lookup(ids_T: Tensor, table_VD: Tensor) -> Tensor:
    """Return the rows ``[..., D]`` of the table for integer ids ``[...]``, bit for bit. Differentiable in the table.

    Raises:
        IndexError: an id is not below the number of rows.
    """
    return torch.nn.functional.embedding(ids_T.long(), table_VD)


def lookup_in_shard(ids_T: Tensor, shard_VD: Tensor, *, first_row: int) -> Tensor:
    """Return the rows ``[..., D]`` that this part of the table holds, and zeros for all other ids.

    Args:
        ids_T: integer ids ``[...]`` into the whole table.
        shard_VD: consecutive rows of the table.
        first_row: id of the first of them.

    Added up over the shards of a table, in any order, this is ``lookup``: all terms of a sum but one are zero.
    """
    here = (ids_T >= first_row) & (ids_T < first_row + shard_VD.shape[0])
    rows = lookup((ids_T - first_row).where(here, 0), shard_VD)
    return rows.where(here.unsqueeze(-1), 0.0)
