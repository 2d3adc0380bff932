"""SwiGLU in fp32, rounded once to the input's dtype."""

# F width of the gated MLP
import torch
from torch import Tensor


def swiglu(gate_up_2F: Tensor) -> Tensor:
    """Return ``silu(gate) * up`` ``[..., F]`` in the dtype of the input, rounded once.

    Args:
        gate_up_2F: ``[..., 2F]``, the gate's half first; below fp32 it is computed in fp32, fp64 stays fp64.

    Every element is a function of its own gate and up alone, so results do not depend on batch size, order, padding or
    the number of threads. Differentiable, with a finite gradient for every finite input.

    Both engines' own unfused kernels round ``silu(gate)`` to the model's dtype before they multiply, hence twice.

    Source: Shazeer 2020, eq. 6.
    """
    gate, up = gate_up_2F.to(torch.promote_types(gate_up_2F.dtype, torch.float32)).chunk(2, dim=-1)
    return (_silu(gate) * up).to(gate_up_2F.dtype)


def _silu(gate: Tensor) -> Tensor:
    # torch's own silu takes its exponential by another code path in the last elements of a vector register, so an
    # element's bits would depend on its place. A bare exp does not. Of −|gate|, so that neither it nor its gradient
    # overflows.
    decay = (-gate.abs()).exp()
    return gate * torch.where(gate < 0, decay, 1.0) / (1.0 + decay)
