"""The embedding reference: the table's own bits, whole or in shards."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mismatch_hooks.references.embedding import lookup, lookup_in_shard


def _table(rows: int = 24, width: int = 8, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def test_a_row_is_the_tables_own_whatever_is_looked_up_beside_it() -> None:
    table = _table()
    ids = torch.tensor([[3, 0, 3], [23, 7, 1]], dtype=torch.int32)
    found = lookup(ids, table)
    assert (found.shape, found.dtype) == ((2, 3, 8), torch.bfloat16)
    for at in ((0, 0), (0, 2), (1, 0)):
        assert torch.equal(found[at], table[int(ids[at])])


def test_an_id_beyond_the_table_is_refused() -> None:
    with pytest.raises(IndexError):
        lookup(torch.tensor([24]), _table())


@given(ids=st.lists(st.integers(0, 23), min_size=1, max_size=12), ranks=st.sampled_from([1, 2, 3, 4]))
def test_the_sum_over_shards_is_the_whole_lookup_in_any_order(ids: list[int], ranks: int) -> None:
    table, wanted = _table(), torch.tensor(ids)
    rows = 24 // ranks
    parts = [
        lookup_in_shard(wanted, table[rank * rows : (rank + 1) * rows], first_row=rank * rows) for rank in range(ranks)
    ]
    for order in (parts, parts[::-1]):
        total = order[0]
        for part in order[1:]:
            total = total + part
        assert torch.equal(total, lookup(wanted, table))


def test_gradients_reach_the_rows_that_were_looked_up_and_no_other() -> None:
    table = _table(6, 3, torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda t: lookup(torch.tensor([4, 1, 4]), t), (table,))
    assert torch.autograd.gradcheck(lambda t: lookup_in_shard(torch.tensor([4, 9, 0]), t, first_row=3), (table,))
    lookup(torch.tensor([4, 1, 4]), table).sum().backward()
    assert table.grad is not None
    assert table.grad.sum(-1).tolist() == [0, 3, 0, 0, 6, 0]
