"""Where vLLM's own cache update puts each number of a page, found out by letting it write numbered ones.

The CPU build lays keys out for its processor (transposed, or in groups for AMX), and says nowhere how. Reading its
layout, rather than writing one of ours, keeps every cached block good for the native kernel too: a block cached before
a binding is served under it, and a request that is running when a binding begins or ends goes on.

Written against vllm 0.32 (``AttentionImpl.do_kv_cache_update``; pages of ``[KV heads, tokens, 2 * head dim]``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from mismatch_hooks.pipeline.bind import BindingError
from mismatch_hooks.references.attention import BLOCK_KEYS, Slab

# A whole number up to here is exact in every dtype of a cache.
_BASE = 256
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class StateView:
    """One kind of state, keys or values, as a strided view of a page.

    Attributes:
        start: element of the page that holds the first number.
        sizes: blocks of 32 tokens, KV heads, then the parts of the two last dimensions, outermost first.
        strides: of each, in elements.
    """

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def of(self, cache: Tensor) -> Tensor:
        """Return the view ``[pages, *sizes]`` of a whole cache."""
        return cache.as_strided(
            (cache.shape[0], *self.sizes), (cache.stride(0), *self.strides), cache.storage_offset() + self.start
        )

    def runs(self, cache: Tensor, blocks_P2: Tensor) -> "Runs":
        """Return where blocks of 32 tokens lie in any cache that is laid out as this one.

        Args:
            cache: ``[pages, K, tokens, 2 * D]``; only its shape and strides are looked at.
            blocks_P2: ``[P, 2]``: page, and block in the page.
        """
        inner, length = len(self.sizes), 1
        while inner > 1 and self.strides[inner - 1] == length:
            inner -= 1
            length *= self.sizes[inner]
        whole = gcd(length, cache.stride(0), *self.strides[:inner])
        first = blocks_P2 @ blocks_P2.new_tensor((cache.stride(0), self.strides[0]))
        for size, stride in (*zip(self.sizes[1:inner], self.strides[1:inner], strict=True), (length // whole, whole)):
            first = first[..., None] + torch.arange(size, device=first.device) * stride
        within = (cache.shape[0] - 1) * cache.stride(0) + cache[0].numel() - self.start
        return Runs(
            start=self.start,
            shape=(within // whole, whole),
            rows=first.flatten() // whole,
            sizes=(len(blocks_P2), *self.sizes[1:]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Runs:
    """Blocks of a cache as rows of elements that lie in one piece; to copy those costs a third of indexing by page.

    Attributes:
        start: element of the cache that holds the first number.
        shape: rows in the cache, and elements in each.
        rows: ``[P * …]`` int64, the rows that the blocks are made of, in order.
        sizes: of what is read, blocks first.
    """

    start: int
    shape: tuple[int, int]
    rows: Tensor
    sizes: tuple[int, ...]

    def read(self, cache: Tensor) -> Tensor:
        """Return a copy of the blocks of one layer's cache, ``sizes`` in shape and in the cache's dtype."""
        seen = cache.as_strided(self.shape, (self.shape[1], 1), cache.storage_offset() + self.start)
        return seen.index_select(0, self.rows).view(self.sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageLayout:
    """Where keys and values stand in a page of the cache.

    Attributes:
        keys: seen as ``[blocks, K, D, 32]``.
        values: seen as ``[blocks, K, 32, D]``.
    """

    keys: StateView
    values: StateView

    def runs(self, cache: Tensor, slab: Slab) -> tuple[Runs, Runs]:
        """Return where the keys and values of a slab lie: the same for the cache of every layer that is laid out so.

        Args:
            cache: ``[pages, K, tokens, 2 * D]``.
            slab: its ``blocks`` are ``[P, 2]``: page, and block of 32 tokens in the page.
        """
        return self.keys.runs(cache, slab.blocks), self.values.runs(cache, slab.blocks)

    def gather(self, cache: Tensor, slab: Slab, runs: tuple[Runs, Runs] | None = None) -> tuple[Tensor, Tensor]:
        """Return the keys ``[P, K, D, 32]`` and values ``[P, K, 32, D]`` of a slab in fp32.

        Values that were not written are zeros; keys that were not are hidden by whoever attends.

        Args:
            cache: as in ``runs``.
            slab: as in ``runs``.
            runs: what ``runs`` returned for this slab, so that the layers of one forward work it out once.
        """
        heads, width = cache.shape[1], cache.shape[3] // 2
        keys, values = (one.read(cache) for one in runs or self.runs(cache, slab))
        values = values.reshape(-1, heads, BLOCK_KEYS, width)
        if len(slab.partial):
            # By bits: a page holds what its last owner left, and zero times that need not be zero.
            bits = _BITS[values.element_size()]
            part = values.index_select(0, slab.partial)
            part.view(bits).bitwise_and_(slab.written.to(bits)[:, None, :, None])
            values.index_copy_(0, slab.partial, part)
        return keys.float().reshape(-1, heads, width, BLOCK_KEYS), values.float()


def page_layout(cache: Tensor, update: Callable[[Tensor, Tensor, Tensor, Tensor], object]) -> PageLayout:
    """Return the layout in which ``update`` writes pages of a cache; writes to a page of its own.

    Args:
        cache: ``[pages, K, tokens, 2 * D]``, the live one; only its shape and dtype are read.
        update: from keys and values ``[tokens, K, D]``, a cache and ``[tokens]`` int64 slots: writes them there.

    Raises:
        BindingError: pages are not whole in memory, or the layout is not one of strides.
    """
    _, heads, tokens, width = cache.shape
    if not cache[:1].is_contiguous() or tokens % BLOCK_KEYS:
        raise BindingError(
            f"the rollout's KV cache {list(cache.shape)} has pages that are not whole in memory, or not a multiple "
            f"of {BLOCK_KEYS} tokens long; the attention reference reads only such pages."
        )
    width //= 2
    found = _offsets(cache.new_zeros(1, *cache.shape[1:]), (2, tokens, heads, width), update)
    try:
        keys, values = (_view(one, reverse) for one, reverse in zip(found, (True, False), strict=True))
    except ValueError as error:
        raise BindingError(
            f"the rollout's KV cache {list(cache.shape)} is laid out in a way that the attention reference cannot read "
            f"({error}); report the processor and the vLLM build, and leave attention.kernel out of factors and align."
        ) from None
    return PageLayout(keys=keys, values=values)


def _offsets(page: Tensor, shape: tuple[int, ...], update: Callable[..., object]) -> Tensor:
    """Return ``[2, tokens, K, D]``: the element of the page where each number of the keys and of the values lands."""
    numbers = torch.arange(page.numel(), device=page.device).view(shape)
    slots = torch.arange(shape[1], device=page.device)
    landed, power = torch.zeros_like(numbers.flatten()), 1
    while power < page.numel():
        keys, values = (numbers // power % _BASE).to(page.dtype)
        update(keys, values, page.zero_(), slots)
        landed += page.flatten().long() * power
        power *= _BASE
    return landed.argsort(stable=True).view(shape)


def _view(offsets_TKD: Tensor, is_transposed: bool) -> StateView:
    """Return the strided view that has the given offsets.

    Raises:
        ValueError: no view has them.
    """
    start = int(offsets_TKD[0, 0, 0])
    along = offsets_TKD - start
    parts = [_parts(along[:BLOCK_KEYS, 0, 0].tolist()), _parts(along[0, 0].tolist())]
    axes = [
        *_one(along[::BLOCK_KEYS, 0, 0].tolist()),
        *_one(along[0, :, 0].tolist()),
        *(parts[1] + parts[0] if is_transposed else parts[0] + parts[1]),
    ]
    view = StateView(start=start, sizes=tuple(size for size, _ in axes), strides=tuple(stride for _, stride in axes))
    tokens, heads, width = offsets_TKD.shape
    seen = view.of(torch.arange(offsets_TKD.numel() * 2)[None])
    inner = (width, BLOCK_KEYS) if is_transposed else (BLOCK_KEYS, width)
    seen = seen.reshape(-1, heads, *inner)
    if is_transposed:
        seen = seen.transpose(2, 3)
    if not torch.equal(seen.transpose(1, 2).reshape(tokens, heads, width), offsets_TKD.cpu()):
        raise ValueError("tokens, heads and head dim do not stride on their own")
    return view


def _one(offsets: Sequence[int]) -> list[tuple[int, int]]:
    return [(len(offsets), offsets[1] if len(offsets) > 1 else 0)]


def _parts(offsets: Sequence[int]) -> list[tuple[int, int]]:
    """Return size and stride of each part that one dimension is split into, outermost first."""
    parts: list[tuple[int, int]] = []
    while len(offsets) > 1:
        stride = offsets[1]
        run = next((index for index, offset in enumerate(offsets) if offset != index * stride), len(offsets))
        parts.insert(0, (run, stride))
        offsets = offsets[::run]
    return parts
