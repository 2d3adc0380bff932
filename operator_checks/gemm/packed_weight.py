"""The weight that a live vLLM linear multiplies with, also where the CPU build has packed it away."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class PackedWeight:
    """Reads the weight of one layer; for one binding, since what it keeps is freed with it.

    Where the engine has kept the parameter, that is what is returned, at each call anew. A packed one (its parameter is
    empty) is read by multiplying identity rows, 1 · w plus zeros, which is exact, and kept until a load packs another.
    """

    def __init__(self) -> None:
        """Read nothing yet."""
        self._kernel: Callable[[], object] = lambda: None  # weakly: it owns a packed copy
        self._read: Tensor | None = None

    def of(self, layer: Any) -> Tensor:
        """Return ``[outputs, inputs]``, this rank's part, in the dtype of the model."""
        weight: Tensor = layer.weight
        if weight.ndim == 2:
            return weight
        if self._read is None or self._kernel() is not layer.cpu_linear:
            identity = torch.eye(layer.input_size_per_partition, dtype=layer.params_dtype, device=weight.device)
            self._kernel = weakref.ref(layer.cpu_linear)
            # The kernel that owns the packed copy, not the layer's product: whatever stands there is under examination.
            self._read = layer.cpu_linear(identity, weight, None).T.contiguous()
        return self._read
