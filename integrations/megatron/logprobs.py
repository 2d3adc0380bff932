"""Log-probs of next tokens from the model's own logits: what scores when the loop hands over no function of its own."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mismatch_hooks.integrations.megatron.live_model import (
    UnsupportedTrainerError,
    gpt_model,
    outermost,
    parallel_sizes,
)

# Where fp32 values may be rounded to the model's dtype on their way from the logits to one log-prob; "fp32": nowhere.
WRITE_BACK_POINTS = ("fp32", "logits", "logsumexp", "logprob")


def token_logprobs(
    model: Any,
    input_ids: Tensor,
    *,
    vocab_size: int | None = None,
    write_back: str = "fp32",
    temperatures: Sequence[float] | None = None,
) -> Tensor:
    """Return the log-prob of each next token under the present weights, normalised in fp32.

    Args:
        model: a ``GPTModel``, wrapped or not; tensor-parallel logits may stay sharded.
        input_ids: ``[batch, sequence]`` int64, right-padded: causal attention hides the padding from what counts.
        vocab_size: columns that are words; the padding beyond them is kept out of the log-sum-exp. None: all columns.
        write_back: one of ``WRITE_BACK_POINTS``: the values that are stored in the model's dtype on the way.
        temperatures: what each row's fp32 logits are divided by; 0.0 is greedy, which divides by nothing, as vLLM's
            processed log-probs have it. None: raw log-probs.

    Returns:
        ``[batch, sequence − 1]`` fp32, nats, on the model's device; position p is token p + 1.

    Raises:
        UnsupportedTrainerError: the model is split over pipeline or context ranks.
    """
    inner = gpt_model(model)
    sizes = parallel_sizes(inner)
    if sizes.pipeline > 1 or sizes.context > 1:
        raise UnsupportedTrainerError(
            f"token_logprobs: pipeline {sizes.pipeline}, context {sizes.context}; accepts 1 and 1: pass the loop's own "
            "token_logprobs to MegatronBackend."
        )
    device = next(inner.parameters()).device
    input_ids = input_ids.to(device)
    sequence = input_ids.shape[1]
    positions = torch.arange(sequence, device=device).expand_as(input_ids)
    # Given, because megatron-core makes its default mask on a CUDA device. True hides a key.
    mask = torch.ones(1, 1, sequence, sequence, dtype=torch.bool, device=device).triu(1)
    logits = outermost(model)(input_ids, positions, mask)[:, :-1]
    columns = vocab_size or inner.vocab_size
    if write_back not in WRITE_BACK_POINTS:
        raise ValueError(f"write_back: got {write_back!r}; accepts {', '.join(WRITE_BACK_POINTS)}.")
    stored = next(inner.parameters()).dtype
    if write_back == "logits":
        logits = logits.to(stored)
    kept = stored if write_back == "logsumexp" else torch.float32
    rows = (
        logits
        if temperatures is None
        else (row.float() / (one or 1.0) for row, one in zip(logits, temperatures, strict=True))
    )
    pairs = zip(rows, input_ids[:, 1:], strict=True)  # row by row: the fp32 copy of all logits would be the big one
    if logits.shape[-1] == inner.vocab_size:
        scores = torch.stack([_whole(row[:, :columns], chosen, kept) for row, chosen in pairs])
    else:
        scores = torch.stack([_sharded(row, chosen, columns, inner.pg_collection.tp, kept) for row, chosen in pairs])
    return scores.to(stored).float() if write_back == "logprob" else scores


def _whole(logits: Tensor, chosen: Tensor, kept: torch.dtype) -> Tensor:
    if kept is torch.float32:
        return logits.float().log_softmax(dim=-1).gather(-1, chosen[:, None])[:, 0]
    picked = logits.float().gather(-1, chosen[:, None])[:, 0]
    return picked - logits.float().logsumexp(dim=-1).to(kept).float()


def _sharded(logits: Tensor, chosen: Tensor, columns: int, group: Any, kept: torch.dtype) -> Tensor:
    logits = logits.float()
    first = dist.get_rank(group) * logits.shape[-1]
    padding = torch.arange(first, first + logits.shape[-1], device=logits.device) >= columns
    logits = logits.masked_fill(padding, float("-inf"))
    largest = logits.amax(dim=-1)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    total = (logits - largest[:, None]).exp().sum(dim=-1)
    dist.all_reduce(total, group=group)
    here = (chosen >= first) & (chosen < first + logits.shape[-1])
    picked = logits.gather(-1, (chosen - first).where(here, 0)[:, None])[:, 0].where(here, 0.0)
    dist.all_reduce(picked, group=group)
    if kept is torch.float32:
        return picked - largest - total.log()
    return picked - (largest + total.log()).to(kept).float()
