"""RMS normalisation in fp32, multiplied by its weight in fp32 and rounded once to the input's dtype."""

# D normalised width (the model's, or one head's); every leading shape is rows
import torch
from torch import Tensor


def rms_norm(states_D: Tensor, weight_D: Tensor, *, epsilon: float) -> Tensor:
    """Return ``states / sqrt(mean(states²) + epsilon) * weight`` in the dtype of the states, rounded once.

    Args:
        states_D: ``[..., D]``; below fp32 it is computed in fp32, fp64 stays fp64.
        weight_D: ``[D]``, any floating dtype.
        epsilon: added to the mean square.

    Every row is a function of itself alone, so results do not depend on batch size, order or padding. Differentiable in
    both tensors.

    Two common implementations differ from this one, and so from each other: Hugging Face's ``LlamaRMSNorm`` and vLLM's
    native norm round the normalised value to the model's dtype *before* they multiply by the weight, hence twice.
    ``torch.nn.RMSNorm``, which megatron-core's local layers build, has these bits on a CPU.

    Source: Zhang and Sennrich 2019, eq. 4.
    """
    wide = states_D.to(torch.promote_types(states_D.dtype, torch.float32)).contiguous()
    normalised = wide * torch.rsqrt(_mean_square(wide) + epsilon)
    return (normalised * weight_D.to(wide.dtype)).to(states_D.dtype)


def add_rms_norm(states_D: Tensor, residual_D: Tensor, weight_D: Tensor, *, epsilon: float) -> tuple[Tensor, Tensor]:
    """Return the norm of ``states + residual``, and that sum: what is normalised is what the layers go on with.

    Args:
        states_D: ``[..., D]`` the output of the block before.
        residual_D: ``[..., D]`` the residual stream, of the same dtype.
        weight_D: as in ``rms_norm``.
        epsilon: as in ``rms_norm``.

    The sum is rounded to the model's dtype first, as Hugging Face and megatron-core define it. vLLM's fused norm stores
    the same sum and normalises the one that is not rounded yet.
    """
    total = states_D + residual_D
    return rms_norm(total, weight_D, epsilon=epsilon), total


def _mean_square(wide_D: Tensor) -> Tensor:
    squares = wide_D * wide_D
    if squares.device.type == "cpu":
        # One row is added up by one thread in an order that depends on its width alone (below 32768 values).
        return squares.mean(dim=-1, keepdim=True)
    # A GPU's reduction chooses its order by how many rows there are.
    return sum_by_halves(squares) / squares.shape[-1]


def sum_by_halves(values_D: Tensor) -> Tensor:
    """Return the sum ``[..., 1]`` over the last dimension: its upper half is added to its lower half until one is left.

    Made of element-wise additions only, so a row has the same bits on every device and in every batch.
    """
    width = 1 << (values_D.shape[-1] - 1).bit_length()
    values_D = torch.nn.functional.pad(values_D, (0, width - values_D.shape[-1]))
    while width > 1:
        width //= 2
        values_D = values_D[..., :width] + values_D[..., width:]
    return values_D
