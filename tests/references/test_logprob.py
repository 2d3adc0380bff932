"""The log-prob reference: right to a stated bound, and the same bits on one rank and on several.

The chain: a rank's shards have the bits that they have in the whole vocabulary; all shards meet in one order; hence the
log-prob on 1, 2 or 4 ranks is the same.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mismatch_hooks.references.logprob import SHARD_COLUMNS, chosen_logprobs, log_sum_exp, shards_of

quick = settings(max_examples=40)
TOKENS = st.integers(1, 20)
SHARDS = st.integers(1, 9)
SPREADS = st.sampled_from([0.1, 4.0, 60.0])
SEEDS = st.integers(0, 2**32)


def _logits(tokens: int, columns: int, *, spread: float = 4.0, seed: int = 0) -> Tensor:
    return spread * torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))


def _chosen(tokens: int, words: int, *, seed: int = 0) -> Tensor:
    return torch.randint(words, (tokens,), generator=torch.Generator().manual_seed(seed + 1))


def _on_ranks(logits: Tensor, chosen: Tensor, ranks: int, words: int | None = None) -> Tensor:
    width = logits.shape[-1] // ranks
    parts = [
        shards_of(part, chosen, first_column=rank * width, vocab_size=words or logits.shape[-1])
        for rank, part in enumerate(logits.split(width, -1))
    ]
    return chosen_logprobs(parts)


# ---- right --------------------------------------------------------------------------------------------------------


@quick
@given(TOKENS, st.integers(1, 600), SPREADS, SEEDS)
def test_a_logprob_is_that_of_float64_to_the_error_of_its_fp32_operations(
    tokens: int, columns: int, spread: float, seed: int
) -> None:
    """The bound: ``(3 r + log2(n) + 12) u + 2 u |log-prob|``, u = 2⁻²⁴, with r the range of the logits.

    A difference to the highest logit of a shard and that shard's to the highest of all are off by u r each at most, and
    the chosen one's by u r; exp makes them relative errors and adds 2 u each time. Their product rounds once; a sum by
    halves rounds log2 of its terms times, shards of 64 and the padding to a power of two included (2 more). The log is
    off by 2 u of its value, which is below the log-prob's size plus r, and the last difference by u of the log-prob.
    """
    logits, chosen = _logits(tokens, columns, spread=spread, seed=seed), _chosen(tokens, columns, seed=seed)
    exact = logits.double().log_softmax(-1).gather(-1, chosen[:, None])[:, 0]
    spans = logits.amax(-1) - logits.amin(-1)
    bound = ((3 * spans + math.log2(columns) + 12) + 2 * exact.abs()) * 2.0**-24
    assert bool(((_on_ranks(logits, chosen, 1) - exact).abs() <= bound).all())


def test_equal_logits_give_the_log_of_their_number() -> None:
    """C16's closed form: 512 words and 128 columns of padding; with the padding it would be −ln 640."""
    logits, chosen = torch.zeros(1, 640), torch.tensor([3])
    assert _on_ranks(logits, chosen, 1, words=512).item() == pytest.approx(-math.log(512), abs=2.0**-22)
    assert _on_ranks(logits, chosen, 1).item() == pytest.approx(-math.log(640), abs=2.0**-22)


def test_low_precision_logits_are_computed_in_fp32() -> None:
    logits, chosen = _logits(7, 200).bfloat16(), _chosen(7, 200)
    logprobs = _on_ranks(logits, chosen, 1)
    assert logprobs.dtype is torch.float32
    assert torch.equal(logprobs, _on_ranks(logits.float(), chosen, 1))


def test_the_log_sum_exp_goes_with_the_logprobs() -> None:
    logits, chosen = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([1])
    shards = [shards_of(logits, chosen, vocab_size=2)]
    assert log_sum_exp(shards).item() == pytest.approx(math.log(4.0), abs=2.0**-22)
    assert chosen_logprobs(shards).item() == pytest.approx(math.log(0.75), abs=2.0**-22)


@pytest.mark.parametrize(
    ("logits", "expected"),
    [
        pytest.param([1e30, -1e30], 0.0, id="far apart"),
        pytest.param([-3e38, -3e38], -math.log(2.0), id="near the lowest fp32"),
        pytest.param([0.0, -math.inf], 0.0, id="a word that is ruled out"),
        pytest.param([math.nan, 0.0], math.nan, id="not a number"),
    ],
)
def test_extreme_logits_neither_overflow_nor_hide_a_nan(logits: list[float], expected: float) -> None:
    found = _on_ranks(torch.tensor([logits]), torch.tensor([0]), 1).item()
    assert found == pytest.approx(expected, abs=2.0**-24, nan_ok=True)


# ---- the same bits ------------------------------------------------------------------------------------------------


@quick
@given(TOKENS, SHARDS, st.sampled_from([2, 4]), SPREADS, SEEDS)
def test_the_number_of_ranks_changes_no_bit(tokens: int, shards: int, ranks: int, spread: float, seed: int) -> None:
    columns = shards * ranks * SHARD_COLUMNS
    logits, chosen = _logits(tokens, columns, spread=spread, seed=seed), _chosen(tokens, columns, seed=seed)
    assert torch.equal(_on_ranks(logits, chosen, ranks), _on_ranks(logits, chosen, 1))


@quick
@given(TOKENS, st.integers(1, 600), SEEDS)
def test_padding_changes_no_bit_even_where_a_rank_holds_nothing_else(tokens: int, words: int, seed: int) -> None:
    """Engines pad the vocabulary to multiples that depend on the number of ranks."""
    logits, chosen = _logits(tokens, words, seed=seed), _chosen(tokens, words, seed=seed)
    plain = _on_ranks(logits, chosen, 1)
    for ranks in (1, 2, 4):
        columns = -(-words // (ranks * SHARD_COLUMNS)) * ranks * SHARD_COLUMNS + ranks * SHARD_COLUMNS
        padded = torch.cat((logits, torch.full((tokens, columns - words), 1e4)), -1)
        assert torch.equal(_on_ranks(padded, chosen, ranks, words=words), plain)


@quick
@given(TOKENS, st.integers(1, 600), SEEDS)
def test_a_token_does_not_depend_on_its_neighbours_their_order_or_their_number(
    tokens: int, columns: int, seed: int
) -> None:
    logits, chosen = _logits(tokens, columns, seed=seed), _chosen(tokens, columns, seed=seed)
    whole = _on_ranks(logits, chosen, 1)
    alone = [_on_ranks(logits[row : row + 1], chosen[row : row + 1], 1) for row in range(tokens)]
    assert torch.equal(torch.cat(alone), whole)
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(_on_ranks(logits[order], chosen[order], 1), whole[order])


def test_how_logits_lie_in_memory_and_how_many_threads_there_are_changes_no_bit() -> None:
    logits, chosen, threads, seen = _logits(301, 1000), _chosen(301, 1000), torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            seen += [_on_ranks(one, chosen, 1) for one in (logits, logits.T.contiguous().T)]
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, seen[0]) for one in seen)


def test_torchs_own_log_softmax_has_other_bits() -> None:
    logits, chosen = _logits(64, 512), _chosen(64, 512)
    assert not torch.equal(logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0], _on_ranks(logits, chosen, 1))


def test_a_rank_that_begins_inside_a_shard_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^first_column: got 32; accepts multiples of 64: pad the vocabulary so that"):
        shards_of(torch.zeros(1, 32), torch.tensor([0]), first_column=32, vocab_size=64)


# ---- gradients ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are_those_of_finite_differences(ranks: int) -> None:
    logits = _logits(3, 2 * SHARD_COLUMNS, spread=1.0).double().requires_grad_()
    chosen = torch.tensor([0, 70, 127])
    assert torch.autograd.gradcheck(lambda x: _on_ranks(x, chosen, ranks, words=128), (logits,))


def test_padding_gets_no_gradient() -> None:
    logits = _logits(2, 128).requires_grad_()
    _on_ranks(logits, torch.tensor([0, 5]), 1, words=40).sum().backward()
    assert logits.grad is not None
    assert bool((logits.grad[:, 40:] == 0).all())
    assert bool((logits.grad[:, :40] != 0).all())
