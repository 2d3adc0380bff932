"""The attention reference: right to a stated bound, rounded once, and the same bits however the work is cut up.

A row of whole sequences = the same row alone, in any batch, padding, chunk, order of pages and share of the heads; one
test a link, each of them drawn by hypothesis.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mismatch_hooks.references import attention
from mismatch_hooks.references.attention import BLOCK_KEYS, Slab, attend, causal_attention, plan_tiles

DTYPES = [pytest.param(dtype, id=str(dtype).removeprefix("torch.")) for dtype in (torch.float32, torch.bfloat16)]
LENGTHS = st.integers(1, 100)
HEADS = st.sampled_from([(1, 1), (4, 2), (9, 3), (4, 4), (20, 1)])  # query heads, KV heads; 20 fill more than one tile
WIDTHS = st.sampled_from([32, 64, 80])
SEEDS = st.integers(0, 2**16)
quick = settings(max_examples=20)


def _drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _states(
    sequences: int,
    length: int,
    heads: tuple[int, int],
    width: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values; scores spread widely enough for sharp and for flat rows."""
    query = 3 * _drawn(sequences, length, heads[0], width, seed=seed)
    key, value = (_drawn(sequences, length, heads[1], width, seed=seed + more) for more in (1, 2))
    return query.to(dtype), key.to(dtype), value.to(dtype)


def _whole(states: tuple[Tensor, ...]) -> Tensor:
    return causal_attention(*states, scale=states[0].shape[-1] ** -0.5)


def _in_pieces(states: tuple[Tensor, ...], pieces: list[list[int]], *, seed: int) -> Tensor:
    """Attend as an engine with a paged cache does: a call takes the next few tokens of each sequence.

    Args:
        states: of whole sequences.
        pieces: for each call, how many tokens of each sequence.
        seed: of the order of the cache's blocks.
    """
    query, key, value = states
    sequences, length, heads, width = query.shape
    kv_heads, blocks = key.shape[2], -(-length // BLOCK_KEYS)
    ids = torch.randperm(sequences * blocks, generator=torch.Generator().manual_seed(seed)).view(sequences, blocks)
    cache = torch.full((2, sequences * blocks, kv_heads, BLOCK_KEYS, width), torch.nan)
    done, attended = torch.zeros(sequences, dtype=torch.int64), torch.empty_like(query)

    def gather(slab: Slab) -> tuple[Tensor, Tensor]:
        keys, values = (part[slab.blocks] for part in cache)  # what was never written is NaN in both
        written = slab.written.bool()[:, None, :, None]
        values[slab.partial] = torch.where(written, values[slab.partial], 0.0)
        return keys.transpose(2, 3), values

    for counts in pieces:
        starts, done = done, done + torch.tensor(counts)
        new = [(row, token) for row in range(sequences) for token in range(int(starts[row]), int(done[row]))]
        for row, token in new:
            for kind, part in enumerate((key, value)):
                cache[kind, ids[row, token // BLOCK_KEYS], :, token % BLOCK_KEYS] = part[row, token].float()
        if new:
            plan = plan_tiles(done - starts, done, ids, heads_per_kv=heads // kv_heads, kv_heads=kv_heads)
            at = tuple(torch.tensor(new).unbind(1))
            attended[at] = attend(query[at], gather, plan, scale=width**-0.5)
    assert done.tolist() == [length] * sequences
    return attended


# ---- right --------------------------------------------------------------------------------------------------------


@quick
@given(st.integers(1, 3), LENGTHS, HEADS, WIDTHS, SEEDS)
def test_attention_is_that_of_float64_to_the_error_of_its_fp32_operations(
    sequences: int, length: int, heads: tuple[int, int], width: int, seed: int
) -> None:
    """The bound: ``2 (ε_s + ε_e + (n + 2) u) Σ w |v|``, with ``u = 2⁻²⁴`` and ``n`` the keys, padded to whole blocks.

    A scaled query rounds once, a dot product of D terms is off by at most D u Σ |q k|, the difference to the highest
    score once more: each score is off by ``ε_s = (D + 2) u S`` at most, where S is the largest Σ |q k| scale plus the
    largest |score|. exp makes that a relative error, and adds ε_e = 4 u of its own. Sums of n terms add n u; numerator
    and denominator each carry all of it (the factor of 2), the product and the division one u each.
    """
    states = _states(sequences, length, heads, width, seed=seed)
    query, key, value = (part.double().transpose(1, 2) for part in states)
    key, value = (part.repeat_interleave(heads[0] // heads[1], 1) for part in (key, value))
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
    scores = (query @ key.transpose(2, 3) * width**-0.5).masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1)
    size = (query.abs() @ key.abs().transpose(2, 3)).amax() * width**-0.5
    unit = 2.0**-24
    error = (width + 2) * unit * 2 * size + 4 * unit + (length + BLOCK_KEYS + 2) * unit
    missed = (_whole(states).double().transpose(1, 2) - weights @ value).abs()
    assert bool((missed <= 2 * error * (weights @ value.abs())).all())


def test_low_precision_is_computed_in_fp32_and_rounded_once() -> None:
    states = _states(2, 70, (4, 2), 64, dtype=torch.bfloat16)
    attended = _whole(states)
    assert attended.dtype is torch.bfloat16
    assert torch.equal(attended, _whole(tuple(part.float() for part in states)).bfloat16())


def test_the_scale_and_the_heads_that_share_a_kv_head_take_part() -> None:
    """Two keys; the second query weighs them by 1 and e^(0.5 · 2): heads 0 and 1 read KV head 0, 2 and 3 read 1."""
    query = torch.tensor([0.0, 2.0]).view(1, 2, 1, 1).expand(1, 2, 4, 1).contiguous()
    key = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(1, 2, 2, 1).contiguous()
    value = torch.tensor([[[0.0, 0.0], [1.0, 10.0]]]).unsqueeze(-1)
    attended = causal_attention(query, key, value, scale=0.5)[0, 1, :, 0]
    weight = torch.tensor(1.0).exp() / (1 + torch.tensor(1.0).exp())
    assert torch.allclose(attended, torch.stack([weight, weight, 10 * weight, 10 * weight]), rtol=2.0**-22, atol=0)


def test_a_score_far_above_all_others_neither_overflows_nor_loses_the_row() -> None:
    query, key, value = _states(1, 40, (1, 1), 32)
    assert torch.equal(_whole((query * 1e4, key, value)).isfinite(), torch.ones(1, 40, 1, 32, dtype=torch.bool))


# ---- the same bits ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@quick
@given(st.integers(2, 6), LENGTHS, HEADS, WIDTHS, SEEDS)
def test_a_sequence_alone_has_the_bits_that_it_has_in_any_batch(
    dtype: torch.dtype, sequences: int, length: int, heads: tuple[int, int], width: int, seed: int
) -> None:
    states = _states(sequences, length, heads, width, seed=seed, dtype=dtype)
    together = _whole(states)
    for row in range(sequences):
        assert torch.equal(_whole(tuple(part[row : row + 1] for part in states))[0], together[row])


@quick
@given(st.permutations(range(5)), LENGTHS, HEADS, SEEDS)
def test_the_order_of_the_batch_changes_no_bit(
    order: list[int], length: int, heads: tuple[int, int], seed: int
) -> None:
    states = _states(5, length, heads, 32, seed=seed)
    assert torch.equal(_whole(tuple(part[order] for part in states)), _whole(states)[order])


@pytest.mark.parametrize("dtype", DTYPES)
@quick
@given(LENGTHS, st.integers(1, 200), HEADS, WIDTHS, SEEDS)
def test_what_follows_in_the_row_padding_or_tokens_changes_no_bit(
    dtype: torch.dtype, length: int, more: int, heads: tuple[int, int], width: int, seed: int
) -> None:
    states = _states(1, length + more, heads, width, seed=seed, dtype=dtype)
    longer = _whole(states)[:, :length]
    assert torch.equal(longer, _whole(tuple(part[:, :length] for part in states)))
    padded = tuple(torch.cat((part[:, :length], torch.zeros_like(part[:, length:])), 1) for part in states)
    assert torch.equal(longer, _whole(padded)[:, :length])


@pytest.mark.parametrize("dtype", DTYPES)
@quick
@given(st.lists(st.sampled_from([0, 1, 5, 16, 33, 100]), max_size=3), st.integers(1, 4), LENGTHS, HEADS, WIDTHS, SEEDS)
def test_chunks_of_a_prefill_in_a_mixed_batch_have_the_bits_of_the_whole(
    dtype: torch.dtype, steps: list[int], sequences: int, length: int, heads: tuple[int, int], width: int, seed: int
) -> None:
    """Sequences advance at their own pace, some not at all in a call, through a cache whose blocks are shuffled."""
    states = _states(sequences, length, heads, width, seed=seed, dtype=dtype)
    left, steps = [length] * sequences, [*steps, 7]
    pieces: list[list[int]] = []
    while any(left):
        counts = [min(rest, steps[(len(pieces) + row) % len(steps)]) for row, rest in enumerate(left)]
        left = [rest - count for rest, count in zip(left, counts, strict=True)]
        pieces.append(counts)
    assert torch.equal(_in_pieces(states, pieces, seed=seed), _whole(states))


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=8)
@given(st.integers(1, 3), st.integers(1, 70), HEADS, SEEDS)
def test_decoding_a_row_at_a_time_has_the_bits_of_the_prefill(
    dtype: torch.dtype, sequences: int, length: int, heads: tuple[int, int], seed: int
) -> None:
    states = _states(sequences, length, heads, 64, seed=seed, dtype=dtype)
    assert torch.equal(_in_pieces(states, [[1] * sequences] * length, seed=seed), _whole(states))


@pytest.mark.parametrize("ranks", [2, 4])
@quick
@given(st.integers(1, 3), LENGTHS, st.sampled_from([(4, 4), (8, 4), (36, 12)]), SEEDS)
def test_a_rank_that_holds_a_share_of_the_heads_has_the_bits_of_one_that_holds_all(
    ranks: int, sequences: int, length: int, heads: tuple[int, int], seed: int
) -> None:
    query, key, value = _states(sequences, length, heads, 32, seed=seed)
    parts = zip(query.chunk(ranks, 2), key.chunk(ranks, 2), value.chunk(ranks, 2), strict=True)
    assert torch.equal(torch.cat([_whole(part) for part in parts], 2), _whole((query, key, value)))


def test_ranks_that_hold_copies_of_one_kv_head_have_the_bits_of_one_that_holds_all() -> None:
    """More ranks than KV heads: each keeps a copy and a share of its query heads, so tiles are packed otherwise."""
    query, key, value = _states(2, 50, (8, 2), 64)
    shares = [
        _whole((query[:, :, two : two + 2], key[:, :, [two // 4]], value[:, :, [two // 4]])) for two in (0, 2, 4, 6)
    ]
    assert torch.equal(torch.cat(shares, 2), _whole((query, key, value)))


@quick
@given(st.integers(1, 600), SEEDS)
def test_how_much_is_held_at_once_changes_no_bit(at_once: int, seed: int) -> None:
    states = _states(3, 90, (6, 2), 32, seed=seed)
    whole = _whole(states)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "_PRODUCTS_AT_ONCE", at_once)
        attention._whole_sequences.cache_clear()
        cut = _whole(states)
    attention._whole_sequences.cache_clear()
    assert torch.equal(cut, whole)


def test_a_forward_without_tokens_returns_none() -> None:
    none, ids = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 1, dtype=torch.int64)
    plan = plan_tiles(none, torch.tensor([5, 0]), ids, heads_per_kv=2, kv_heads=1)
    gather: Any = None  # nothing to gather
    assert attend(torch.empty(0, 2, 32), gather, plan, scale=1.0).shape == (0, 2, 32)


@pytest.mark.parametrize("length", [64, 70], ids=["whole blocks", "a block begun"])
def test_states_that_lie_sequence_first_in_memory_have_the_bits_of_contiguous_ones(length: int) -> None:
    states = _states(2, length, (4, 2), 32)
    views = tuple(part.transpose(0, 1).contiguous().transpose(0, 1) for part in states)
    assert not any(part.is_contiguous() for part in views)
    assert torch.equal(_whole(views), _whole(states))


# ---- gradients ----------------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_finite_differences_in_float64() -> None:
    states = [part.double().requires_grad_() for part in _states(2, 5, (4, 2), 4)]
    assert torch.autograd.gradcheck(lambda *parts: causal_attention(*parts, scale=0.5), states)


def test_a_gradient_comes_back_in_the_dtype_of_its_input() -> None:
    states = [part.requires_grad_() for part in _states(1, 6, (2, 1), 32, dtype=torch.bfloat16)]
    _whole(tuple(states)).float().sum().backward()
    assert [part.grad is not None and part.grad.dtype for part in states] == [torch.bfloat16] * 3


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device; not run on a GPU yet")
def test_on_a_gpu_a_row_has_the_same_bits_in_any_batch_and_length() -> None:
    states = tuple(part.cuda() for part in _states(5, 200, (9, 3), 64, dtype=torch.bfloat16))
    together = _whole(states)
    for row, length in enumerate((1, 17, 64, 130, 200)):
        alone = _whole(tuple(part[row : row + 1, :length] for part in states))
        assert torch.equal(alone[0], together[row, :length])
