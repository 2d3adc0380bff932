"""The arithmetic of GRPO: advantages within a group, the clipped loss, the distance to the initial policy."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Finished sequences as the trainer takes them, right-padded.

    Attributes:
        input_ids: ``[batch, sequence]`` int64, prompt and response, padded with 0.
        prompt_lengths: ``[batch]`` int64, tokens.
        response_ids: ``[batch, response]`` int64, padded with 0.
        response_mask: ``[batch, response]`` bool, True on sampled tokens.
        advantages: ``[batch]`` fp32.
    """

    input_ids: Tensor
    prompt_lengths: Tensor
    response_ids: Tensor
    response_mask: Tensor
    advantages: Tensor

    def minibatches(self, count: int) -> Iterator["Batch"]:
        """The batch in ``count`` equal parts, in order; ``count`` divides the batch."""
        columns = [getattr(self, field.name).chunk(count) for field in fields(self)]
        for parts in zip(*columns, strict=True):
            yield Batch(**{field.name: part for field, part in zip(fields(self), parts, strict=True)})


def make_batch(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], advantages: Tensor) -> Batch:
    """Pad sequences to a batch; ``advantages`` is ``[batch]`` in the same order."""
    pad = torch.nn.utils.rnn.pad_sequence
    response_lengths = torch.tensor([len(response) for response in responses])
    return Batch(
        input_ids=pad([torch.tensor([*p, *r]) for p, r in zip(prompts, responses, strict=True)], batch_first=True),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        response_ids=pad([torch.tensor([*response]) for response in responses], batch_first=True),
        response_mask=torch.arange(int(response_lengths.max())) < response_lengths[:, None],
        advantages=advantages,
    )


def group_advantages(rewards: Tensor) -> Tensor:
    """Rewards of each group in units of the group's own spread around its mean.

    A group whose rewards are all equal says nothing, and gets zeros.

    Args:
        rewards: ``[prompts, samples]`` fp32, two samples or more.

    Returns:
        ``[prompts × samples]`` fp32, group after group.

    Source: Shao et al. 2024, section 4.1.2.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    return (centred / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten()


def policy_loss(
    training_logprobs: Tensor,
    logprobs_before_update: Tensor,
    batch: Batch,
    *,
    epsilon_low: float,
    epsilon_high: float,
) -> Tensor:
    """The clipped objective, negated, averaged over the response tokens of the batch and not over its sequences.

    Args:
        training_logprobs: ``[batch, response]`` fp32 of the policy under update; carries the gradient.
        logprobs_before_update: ``[batch, response]`` fp32, no gradient: the trainer's own, of the policy that sampled.
        batch: tokens, mask and advantages.
        epsilon_low: the ratio is clipped to ``[1 − epsilon_low, 1 + epsilon_high]``.
        epsilon_high: see above.

    Returns:
        A scalar, fp32.

    Source: Schulman et al. 2017, eq. 7; token-level average and two epsilons as in Yu et al. 2025, section 3.
    """
    advantages = batch.advantages[:, None]
    ratio = (training_logprobs - logprobs_before_update).exp()
    clipped = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    return -torch.min(ratio * advantages, clipped * advantages)[batch.response_mask].mean()


def kl_to_initial(training_logprobs: Tensor, initial_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """The k3 estimate of the divergence from the initial policy, averaged over response tokens; 0 or more.

    Args:
        training_logprobs: ``[batch, response]`` fp32; carries the gradient.
        initial_logprobs: ``[batch, response]`` fp32, the same tokens under the initial weights.
        response_mask: ``[batch, response]`` bool.

    Returns:
        A scalar, fp32.

    Source: k3 of Schulman 2020, "Approximating KL divergence", with the sampling policy as the base.
    """
    delta = (initial_logprobs - training_logprobs)[response_mask]
    return (delta.expm1() - delta).mean()
