"""Causal attention in fixed tiles: a row has the same bits however the work around it was cut up.

A query row meets its keys in blocks of 32. Its highest score is found first, which is exact in any order; then the
weights and the weighted values are summed inside each block, and block after block. Sixteen rows at a time are
multiplied with one block, whatever there is to do, because the bits of a matrix product depend on its shape. A block
that a row may not see adds exact zeros. So nothing that the row does not see can move its bits: not the length of its
sequence, its neighbours in the batch, how much of the sequence comes in one call, or how many heads this rank holds.
"""

# T query tokens of all sequences, B sequences, L tokens of each, N query heads, K KV heads, G = N / K heads that share
# a KV head, D head dim, J blocks of a sequence, P pairs of a tile and a block that it sees, R = T * G rows a KV head
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from mismatch_hooks.references.norm import sum_by_halves

TILE_ROWS = 8
BLOCK_KEYS = 32
# Products of one tile, one block and one KV head that are held at once: about 35 KB each at a head dim of 64.
_PRODUCTS_AT_ONCE = 256


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Slab:
    """Tiles that are worked on at once, those that see most blocks first.

    Attributes:
        rows: ``[tiles * 8]`` query row of each tile row; a row that only fills a tile repeats another.
        tiles: ``[P]`` tile of each pair; pairs are in order of block, then tile.
        blocks: ``[P, …]`` where the caller keeps each pair's block.
        hidden: ``[P, 1, rows, 32]`` bool, True where a row may not see a key.
        partial: ``[Q]`` int64, the pairs some of whose keys lie beyond the end of their sequence.
        written: ``[Q, 32]`` int32, of those pairs: no bit set where a key lies beyond the end, else every bit.
        counts: how many tiles see a first, a second, … block.
    """

    rows: Tensor
    tiles: Tensor
    blocks: Tensor
    hidden: Tensor
    partial: Tensor
    written: Tensor
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TilePlan:
    """How the rows of one model forward fall into tiles, and which blocks each tile meets: the same for every layer.

    Attributes:
        slabs: all tiles.
        seats: ``[R]`` where each query row sits among the tile rows of all slabs.
    """

    slabs: tuple[Slab, ...]
    seats: Tensor


# From a slab to the keys [P, K, D, 32] and values [P, K, 32, D] of its pairs.
GatherBlocks = Callable[[Slab], tuple[Tensor, Tensor]]


def plan_tiles(
    query_lengths_B: Tensor, key_lengths_B: Tensor, block_ids_BJ: Tensor, *, heads_per_kv: int, kv_heads: int
) -> TilePlan:
    """Return the plan for sequences whose last tokens are the queries.

    Args:
        query_lengths_B: ``[B]`` int64, query tokens of each sequence, 0 or more; they follow each other in the batch.
        key_lengths_B: ``[B]`` int64, keys of each sequence, the query tokens included.
        block_ids_BJ: ``[B, J, …]`` int64, where the caller keeps each sequence's blocks of 32 keys; what lies beyond
            the sequence's last block is never used.
        heads_per_kv: query heads that share a KV head.
        kv_heads: KV heads on this rank; decides how much is worked on at once, and no bit.
    """
    rows_B = query_lengths_B * heads_per_kv
    tiles_B = (rows_B + TILE_ROWS - 1) // TILE_ROWS
    within = torch.arange(TILE_ROWS, device=rows_B.device)
    sequence = torch.arange(len(rows_B), device=rows_B.device).repeat_interleave(tiles_B)
    nth_tile = torch.arange(len(sequence), device=rows_B.device) - (tiles_B.cumsum(0) - tiles_B)[sequence]
    row = nth_tile[:, None] * TILE_ROWS + within
    is_real = row < rows_B[sequence][:, None]
    row = torch.where(is_real, row, 0)
    position = (key_lengths_B - query_lengths_B)[sequence][:, None] + row // heads_per_kv
    blocks_seen, order = (position.amax(1) // BLOCK_KEYS + 1).sort(descending=True, stable=True)
    row = ((rows_B.cumsum(0) - rows_B)[sequence][:, None] + row)[order]
    sequence, position, is_real = sequence[order], position[order], is_real[order]
    slabs, first = [], 0
    for counts in _cut(blocks_seen.tolist(), max(_PRODUCTS_AT_ONCE // kv_heads, 1)):
        held = slice(first, first + counts[0])
        first = held.stop
        block, tile = _pairs(blocks_seen[held], len(counts))
        key = block[:, None] * BLOCK_KEYS + torch.arange(BLOCK_KEYS, device=block.device)
        hidden = key[:, None] > position[held][tile][:, :, None]
        of_pair = sequence[held][tile]
        beyond = key >= key_lengths_B[of_pair][:, None]
        partial = beyond.any(1).nonzero().squeeze(1)
        slabs.append(
            Slab(
                rows=row[held].flatten(),
                tiles=tile,
                blocks=block_ids_BJ[of_pair, block],
                hidden=hidden[:, None],
                partial=partial,
                written=-(~beyond[partial]).int(),
                counts=counts,
            )
        )
    seats = torch.empty(int(rows_B.sum()), dtype=torch.int64, device=rows_B.device)
    seats[row[is_real]] = is_real.flatten().nonzero().squeeze(1)
    return TilePlan(slabs=tuple(slabs), seats=seats)


def _cut(blocks_seen: Sequence[int], pairs_at_once: int) -> list[tuple[int, ...]]:
    """Cut tiles, given by how many blocks each sees, descending, into slabs; each by its tiles per block."""
    slabs: list[tuple[int, ...]] = []
    first = 0
    while first < len(blocks_seen):
        held = max(pairs_at_once // blocks_seen[first], 1)
        ascending = blocks_seen[first : first + held][::-1]
        slabs.append(tuple(len(ascending) - bisect_right(ascending, block) for block in range(ascending[-1])))
        first += held
    return slabs


def _pairs(blocks_seen: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """Return block and tile of each pair, in order of block, then tile."""
    sees = blocks_seen > torch.arange(most, device=blocks_seen.device)[:, None]
    block, tile = sees.nonzero(as_tuple=True)
    return block, tile


def attend(query_TND: Tensor, gather: GatherBlocks, plan: TilePlan, *, scale: float) -> Tensor:
    """Return ``softmax(query · keys * scale) · values`` of every query row, in the query's dtype, rounded once.

    Below fp32 it is computed in fp32; fp64 stays fp64. Not differentiable: see ``causal_attention``.

    Args:
        query_TND: ``[T, N, D]``, the tokens in the order of the plan.
        gather: the keys ``[P, K, D, 32]`` and values ``[P, K, 32, D]`` of a slab's ``blocks``. Values are zeros where
            they are not ``written``, and those that were written must be finite: a hidden key counts as zero times its
            value. A key that is hidden may be anything.
        plan: how the rows fall into tiles.
        scale: of the scores; applied to the query.
    """
    tokens, heads, width = query_TND.shape
    if not tokens:
        return torch.empty_like(query_TND)
    shared = len(plan.seats) // tokens
    wide = torch.promote_types(query_TND.dtype, torch.float32)
    scaled = query_TND.to(wide) * scale
    rows_RKD = scaled.view(tokens, heads // shared, shared, width).transpose(1, 2).flatten(0, 1)
    mixed = [_attend_slab(rows_RKD, slab, gather) for slab in plan.slabs]
    seated = (torch.cat(mixed) if len(mixed) > 1 else mixed[0]).index_select(0, plan.seats).to(query_TND.dtype)
    return seated.view(tokens, shared, -1, width).transpose(1, 2).reshape(query_TND.shape)


def _attend_slab(rows_RKD: Tensor, slab: Slab, gather: GatherBlocks) -> Tensor:
    """Return ``[tiles * 8, K, D]`` in fp32 or wider, of query rows that are scaled already."""
    query = rows_RKD.index_select(0, slab.rows).unflatten(0, (-1, TILE_ROWS)).transpose(1, 2)
    query = query.index_select(0, slab.tiles)
    # The bits of a product depend on how its factors lie in memory.
    key, value = (part.to(query.dtype).contiguous() for part in gather(slab))
    scores = _multiply(query, key).masked_fill_(slab.hidden, -torch.inf)
    highest = _over_blocks(scores.amax(-1, keepdim=True), slab.counts, torch.maximum)
    weights = scores.sub_(highest.index_select(0, slab.tiles)).exp_()
    total = _over_blocks(_sum_of_block(weights), slab.counts, torch.add)
    mixed = _over_blocks(_multiply(weights, value), slab.counts, torch.add)
    return (mixed / total).transpose(1, 2).flatten(0, 1)


def _multiply(left: Tensor, right: Tensor) -> Tensor:
    return torch.bmm(left.flatten(0, 1), right.flatten(0, 1)).view(*left.shape[:3], right.shape[3])


def _sum_of_block(weights: Tensor) -> Tensor:
    if weights.device.type == "cpu":
        # One row is added up by one thread in an order that depends on its width alone.
        return weights.sum(-1, keepdim=True)
    # A GPU's reduction chooses its order by how many rows there are.
    return sum_by_halves(weights)


def _over_blocks(pairs: Tensor, counts: Sequence[int], combine: Callable[..., Tensor]) -> Tensor:
    """Combine each tile's pairs, block after block, into its first; tiles that see most blocks come first."""
    total, start = pairs[: counts[0]], counts[0]
    for count in counts[1:]:
        held = total if count == counts[0] else total[:count]
        combine(held, pairs[start : start + count], out=held)
        start += count
    return total


def causal_attention(query_BLND: Tensor, key_BLKD: Tensor, value_BLKD: Tensor, *, scale: float) -> Tensor:
    """Return causal self-attention ``[B, L, N, D]`` over whole sequences, as ``attend`` computes it.

    Args:
        query_BLND: ``[B, L, N, D]``; query head ``n`` reads KV head ``n // (N / K)``.
        key_BLKD: ``[B, L, K, D]`` of the same dtype.
        value_BLKD: as the keys.
        scale: of the scores.

    Shorter sequences are padded on the right; what stands there changes no bit of a row before it. Differentiable in
    all three tensors; the gradient is that of torch's own causal attention in fp32 (fp64 for fp64).
    """
    attended: Tensor = _CausalAttention.apply(query_BLND, key_BLKD, value_BLKD, scale)  # type: ignore[no-untyped-call]
    return attended


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query_BLND: Tensor, key_BLKD: Tensor, value_BLKD: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(query_BLND, key_BLKD, value_BLKD)
        ctx.scale = scale
        sequences, length, heads, _ = query_BLND.shape
        kv_heads = key_BLKD.shape[2]
        plan = _whole_sequences(sequences, length, heads // kv_heads, kv_heads, query_BLND.device)
        wide = torch.promote_types(query_BLND.dtype, torch.float32)
        keys, values = (
            _blocks(key_BLKD.to(wide)).transpose(2, 3).contiguous(),
            _blocks(value_BLKD.to(wide)).contiguous(),
        )

        def gather(slab: Slab) -> tuple[Tensor, Tensor]:
            return keys.index_select(0, slab.blocks), values.index_select(0, slab.blocks)

        return attend(query_BLND.flatten(0, 1), gather, plan, scale=scale).view(query_BLND.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        saved: Sequence[Tensor] = ctx.saved_tensors
        wide = torch.promote_types(saved[0].dtype, torch.float32)
        with torch.enable_grad():
            query, key, value = (part.detach().to(wide).transpose(1, 2).requires_grad_() for part in saved)
            attended = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=ctx.scale, enable_gqa=True
            )
            found = torch.autograd.grad(attended, (query, key, value), gradients[0].to(wide).transpose(1, 2))
        return *(one.transpose(1, 2).to(part.dtype) for one, part in zip(found, saved, strict=True)), None


def _blocks(states_BLKD: Tensor) -> Tensor:
    """Return ``[B * J, K, 32, D]``, the last block of each sequence filled with zeros."""
    _, length, heads, width = states_BLKD.shape
    missing = -length % BLOCK_KEYS
    padded = functional.pad(states_BLKD, (0, 0, 0, 0, 0, missing))
    return padded.reshape(-1, BLOCK_KEYS, heads, width).transpose(1, 2)


@lru_cache(maxsize=4)  # one forward's layers share it
def _whole_sequences(sequences: int, length: int, heads_per_kv: int, kv_heads: int, device: torch.device) -> TilePlan:
    lengths = torch.full((sequences,), length, device=device)
    blocks = -(-length // BLOCK_KEYS)
    ids = torch.arange(sequences * blocks, device=device).view(sequences, blocks)
    return plan_tiles(lengths, lengths, ids, heads_per_kv=heads_per_kv, kv_heads=kv_heads)
