"""The layout of a paged cache is found by what its update writes, and read back to the bit."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mismatch_hooks.operator_checks.attention.paged_cache import page_layout
from mismatch_hooks.pipeline.bind import BindingError

TOKENS, HEADS, WIDTH = 128, 3, 48
Place = Callable[[Tensor, Tensor], Tensor]

# Where a head's state of a token and a dimension stands among the head's TOKENS * WIDTH.
PLAIN: Place = lambda token, dim: token * WIDTH + dim  # noqa: E731
TRANSPOSED: Place = lambda token, dim: dim * TOKENS + token  # noqa: E731
# AMX: 16 tokens at a time, two neighbours of a dimension side by side.
PAIRS_OF_DIMS: Place = lambda token, dim: (token // 16) * 16 * WIDTH + dim // 2 * 32 + token % 16 * 2 + dim % 2  # noqa: E731
PAIRS_OF_TOKENS: Place = lambda token, dim: (token // 2) * 2 * WIDTH + dim * 2 + token % 2  # noqa: E731
SWIZZLED: Place = lambda token, dim: token * WIDTH + (dim + token) % WIDTH  # noqa: E731


def _update(keys_at: Place, values_at: Place) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]:
    """A cache update for pages of [heads][keys, then values]."""
    token, dim = torch.arange(TOKENS)[:, None], torch.arange(WIDTH)[None]

    def update(keys: Tensor, values: Tensor, cache: Tensor, slots: Tensor) -> None:
        for row, slot in enumerate(slots.tolist()):
            for head in range(HEADS):
                page = cache[slot // TOKENS, head].view(-1)
                page[keys_at(token, dim)[slot % TOKENS]] = keys[row, head]
                page[TOKENS * WIDTH + values_at(token, dim)[slot % TOKENS]] = values[row, head]

    return update


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("keys_at", "values_at"),
    [
        pytest.param(PLAIN, PLAIN, id="plain"),
        pytest.param(TRANSPOSED, PLAIN, id="keys transposed"),
        pytest.param(PAIRS_OF_DIMS, PAIRS_OF_TOKENS, id="in pairs"),
    ],
)
def test_blocks_come_back_as_they_were_written_whatever_the_layout(
    keys_at: Place, values_at: Place, dtype: torch.dtype
) -> None:
    """Of five pages three blocks are read, the last one written half; what a page held before stays behind."""
    update = _update(keys_at, values_at)
    cache = torch.full((5, HEADS, TOKENS, 2 * WIDTH), torch.nan, dtype=dtype)
    before = cache.clone()
    layout = page_layout(cache, update)
    assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 5 * TOKENS, HEADS, WIDTH, generator=generator).to(dtype)
    blocks = torch.tensor([[4, 1], [0, 3], [2, 0]])
    written = torch.full((3, 32), -1, dtype=torch.int32)
    written[2, 16:] = 0
    slots = (blocks[:, :1] * TOKENS + blocks[:, 1:] * 32 + torch.arange(32))[written.bool()]
    update(keys[slots], values[slots], cache, slots)
    slab: Any = SimpleNamespace(blocks=blocks, partial=torch.tensor([2]), written=written[2:])
    read_keys, read_values = layout.gather(cache, slab)
    expected = torch.zeros(2, 3, 32, HEADS, WIDTH)
    expected[:, written.bool()] = torch.stack((keys[slots], values[slots])).float()
    # Keys that were not written are what the page held before: whoever attends hides them, and no value may be NaN.
    is_written = written.bool()[:, None, None, :].expand(read_keys.shape)
    assert torch.equal(read_keys[is_written], expected[0].permute(0, 2, 3, 1)[is_written])
    assert bool(read_keys[~is_written].isnan().all())
    assert torch.equal(read_values, expected[1].permute(0, 2, 1, 3))


def test_a_layout_that_is_not_one_of_strides_is_refused() -> None:
    cache = torch.zeros(2, HEADS, TOKENS, 2 * WIDTH)
    with pytest.raises(BindingError, match=r"^the rollout's KV cache \[2, 3, 128, 96\] is laid out in a way that the"):
        page_layout(cache, _update(SWIZZLED, PLAIN))


@pytest.mark.parametrize(
    "cache",
    [
        pytest.param(torch.zeros(2, 2 * HEADS, TOKENS, 2 * WIDTH)[:, ::2], id="pages with holes"),
        pytest.param(torch.zeros(2, HEADS, 48, 2 * WIDTH), id="pages of 48 tokens"),
    ],
)
def test_pages_that_cannot_be_cut_into_blocks_are_refused(cache: Tensor) -> None:
    with pytest.raises(BindingError, match=r"has pages that are not whole in memory, or not a multiple of 32 tokens"):
        page_layout(cache, _update(PLAIN, PLAIN))
