"""What a rotary table implies: theta and scaling, derived from the frequencies that the model rotates with."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary:
    """A rotary embedding as its frequencies show it.

    Attributes:
        theta: base; exact where a candidate reproduces the frequencies bit for bit, else to six digits.
        scaling_type: ``"default"``, ``"linear"``, ``"llama3"`` or ``"unknown"``.
        scaling_factor: the slowest frequency is divided by this; 1.0 is none.
        last: the slowest inverse frequency, radians per position.
    """

    theta: float
    scaling_type: str
    scaling_factor: float
    last: float


def read_rotary(frequencies: Tensor, candidates: Sequence[float]) -> Rotary:
    """Derive theta and scaling from inverse frequencies.

    Args:
        frequencies: ``[rotary_dim / 2]`` fp32 (2 or more), fastest first, as rotated with at position 1.
        candidates: bases that somebody asked for, most likely first; one is taken when it gives the same bits.
    """
    frequencies = frequencies.detach().float().cpu()
    linear = 1.0 / float(frequencies[0])  # the fastest frequency is 1 unless positions are interpolated
    unscaled = frequencies * linear if linear != 1.0 else frequencies
    theta = _theta(unscaled, candidates)
    ratios = _frequencies(theta, len(frequencies)) / unscaled
    last, same = float(ratios[-1]), torch.allclose(ratios, torch.ones(()), rtol=1e-5, atol=0.0)
    if same:
        kind, factor = ("default", 1.0) if linear == 1.0 else ("linear", linear)
    else:
        # llama3 leaves fast frequencies alone and divides slow ones by one factor.
        kind, factor = ("llama3" if linear == 1.0 and last > 1.0 else "unknown"), last * linear
    return Rotary(theta=theta, scaling_type=kind, scaling_factor=_digits(factor, 6), last=float(frequencies[-1]))


def _theta(frequencies: Tensor, candidates: Sequence[float]) -> float:
    # The second frequency is theta^(−2/dim), and no scaling rule in use touches it.
    estimate = float(frequencies[1].double() ** -len(frequencies))
    for theta in (*candidates, *(_digits(estimate, digits) for digits in range(1, 8))):
        if abs(theta / estimate - 1.0) < 1e-3 and torch.equal(_frequencies(theta, len(frequencies))[1], frequencies[1]):
            return float(theta)
    return _digits(estimate, 6)


def _frequencies(theta: float, count: int) -> Tensor:
    return 1.0 / theta ** (torch.arange(0, 2 * count, 2, dtype=torch.float32) / (2 * count))


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")
