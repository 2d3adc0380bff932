"""A cheap sign that weights were written."""

from typing import Any

import torch
from torch import Tensor

_SAMPLES = 512  # values a tensor; an optimizer step in bf16 changes a few in a hundred at the least


class MutationCounter:
    """Counts writes to the parameters and buffers of a model.

    torch's version counters alone are blind to ``parameter.data.copy_(…)``, which is how megatron-core's optimizers
    write their fp32 masters back. So an evenly spaced sample of each tensor's bits is compared with the last one too.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._changes = 0
        self._sample: Tensor | None = None

    def count(self) -> int:
        """Return the sum of version counters and of changes seen; equal to the last call's means probably unchanged."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        sample = torch.stack([_sample(tensor) for tensor in tensors]).cpu()
        if self._sample is not None and not torch.equal(sample, self._sample):
            self._changes += 1
        self._sample = sample
        return sum(int(tensor._version) for tensor in tensors) + self._changes


def _sample(tensor: Tensor) -> Tensor:
    values = tensor.detach().flatten()
    bits = values[:: max(1, values.numel() // _SAMPLES)].contiguous().view(torch.uint8).long()
    # Weighted by position, so that two values that swap places do not cancel.
    return (bits * torch.arange(1, bits.numel() + 1, device=bits.device)).sum()
