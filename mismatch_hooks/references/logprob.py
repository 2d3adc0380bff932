"""Log-probs from logits in fp32, summed by fixed shards of the vocabulary: the same bits on one rank or on several.

The vocabulary is cut every 64 columns. A rank takes the highest logit and the sum of each of its own shards; all shards
of all ranks then meet in one sum, whose order depends on the number of shards alone. So no bit depends on how many
ranks share the vocabulary, on what padding follows it, or on the rows that are worked on together.
"""

# T tokens, V columns of logits (this rank's), S shards of 64 columns
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from mismatch_hooks.references.norm import sum_by_halves

SHARD_COLUMNS = 64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VocabShards:
    """What one rank knows of each of its shards.

    Attributes:
        largest: ``[..., S]`` highest logit; minus infinity in a shard of padding. Has no gradient.
        totals: ``[..., S]`` sum of ``exp(logit - largest)``.
        chosen: ``[...]`` logit of the chosen token, 0 where another rank holds it.
    """

    largest: Tensor
    totals: Tensor
    chosen: Tensor


def shards_of(logits_TV: Tensor, chosen_T: Tensor, *, first_column: int = 0, vocab_size: int) -> VocabShards:
    """Return this rank's shards.

    Args:
        logits_TV: ``[..., V]`` this rank's columns; below fp32 they are computed in fp32, fp64 stays fp64.
        chosen_T: ``[...]`` integer token ids into the whole vocabulary.
        first_column: id of this rank's first column.
        vocab_size: columns that are words; those from here on are padding and take no part.

    Raises:
        ValueError: ``first_column`` lies inside a shard, so that two ranks would share one.
    """
    if first_column % SHARD_COLUMNS:
        raise ValueError(
            f"first_column: got {first_column}; accepts multiples of {SHARD_COLUMNS}: pad the vocabulary so that every "
            "rank holds whole shards."
        )
    columns = logits_TV.shape[-1]
    logits_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32))
    here = (chosen_T >= first_column) & (chosen_T < first_column + columns)
    picked = logits_TV.gather(-1, (chosen_T - first_column).where(here, 0).unsqueeze(-1)).squeeze(-1)
    words = min(max(vocab_size - first_column, 0), columns)
    padded = functional.pad(logits_TV[..., :words], (0, columns - words + -columns % SHARD_COLUMNS), value=-math.inf)
    shards = padded.unflatten(-1, (-1, SHARD_COLUMNS))
    largest = shards.detach().amax(-1)
    shifted = shards - torch.where(largest == -math.inf, 0.0, largest).unsqueeze(-1)
    return VocabShards(largest=largest, totals=sum_by_halves(shifted.exp()).squeeze(-1), chosen=picked.where(here, 0.0))


def log_sum_exp(ranks: Sequence[VocabShards]) -> Tensor:
    """Return the log of the sum of ``exp(logit)`` over the whole vocabulary, ``[...]``, nats.

    Args:
        ranks: the shards of every rank, in the order of their columns.
    """
    largest, log_total = _normaliser(ranks)
    return largest + log_total


def chosen_logprobs(ranks: Sequence[VocabShards]) -> Tensor:
    """Return the log-prob of the chosen token, ``[...]`` fp32 or wider, nats. Differentiable in the logits.

    Args:
        ranks: the shards of every rank, in the order of their columns.
    """
    largest, log_total = _normaliser(ranks)
    chosen = torch.stack([rank.chosen for rank in ranks]).sum(0)  # all terms but one are zero
    return (chosen - largest) - log_total


def _normaliser(ranks: Sequence[VocabShards]) -> tuple[Tensor, Tensor]:
    largest_TS = torch.cat([rank.largest for rank in ranks], -1)
    totals_TS = torch.cat([rank.totals for rank in ranks], -1)
    largest_T = largest_TS.amax(-1)
    # The upper half is added to the lower one, so shards of padding at the end add zeros and change no bit.
    total_T = sum_by_halves(totals_TS * (largest_TS - largest_T.unsqueeze(-1)).exp()).squeeze(-1)
    return largest_T, total_T.log()
