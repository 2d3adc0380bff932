"""Rotary position embedding in fp32, rounded once to the input's dtype."""

# T tokens, N heads, H head dim, R rotary dim (R <= H; the rest of the head passes through)
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

SCALING_TYPES = ("default", "linear", "llama3")


class UnsupportedRopeError(ValueError):
    """The model asks for a rotary embedding that has no reference here."""


def inverse_frequencies(*, theta: float, rotary_dim: int, scaling: Mapping[str, object]) -> Tensor:
    """Return the inverse frequencies ``[rotary_dim / 2]`` in fp32 on the CPU.

    Args:
        theta: rotary base.
        rotary_dim: rotated part of each head, even.
        scaling: the model file's rope scaling; empty or ``rope_type: default`` is none, ``linear`` divides by
            ``factor``, ``llama3`` interpolates between wavelengths.

    Raises:
        UnsupportedRopeError: another ``rope_type``, or a scaling parameter that is missing.

    Source: Su et al. 2021, eq. 15; the llama3 rule is that of the Llama 3.1 model card's configuration.
    """
    kind = str(scaling.get("rope_type", scaling.get("type", "default")))
    frequencies = 1.0 / theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / _parameter(scaling, "factor")
    if kind == "llama3":
        return _llama3(frequencies, scaling)
    raise UnsupportedRopeError(f"rope_type: got {kind!r}; the fp32 reference knows {', '.join(SCALING_TYPES)}.")


def _llama3(frequencies: Tensor, scaling: Mapping[str, object]) -> Tensor:
    factor = _parameter(scaling, "factor")
    low, high = _parameter(scaling, "low_freq_factor"), _parameter(scaling, "high_freq_factor")
    context = _parameter(scaling, "original_max_position_embeddings")
    wavelengths = 2 * math.pi / frequencies
    smooth = ((context / wavelengths - low) / (high - low)).clamp(0.0, 1.0) if high != low else torch.zeros(())
    mixed = (1 - smooth) * frequencies / factor + smooth * frequencies
    return torch.where(
        wavelengths < context / high,
        frequencies,
        torch.where(wavelengths > context / low, frequencies / factor, mixed),
    )


def _parameter(scaling: Mapping[str, object], name: str) -> float:
    value = scaling.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UnsupportedRopeError(f"rope scaling {name}: got {value!r}; accepts a number, as in the model file.")
    return float(value)


@dataclass(slots=True)
class RotaryTable:
    """Cosines and sines in fp32, one row a position, grown when a later position is asked for.

    Attributes:
        inverse: ``[rotary_dim / 2]`` fp32.
    """

    inverse: Tensor
    _rows: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def at(self, positions_T: Tensor) -> tuple[Tensor, Tensor]:
        """Return cos and sin, each ``[T, 1, rotary_dim / 2]`` fp32, for integer positions."""
        rows = self._rows.get(positions_T.device)
        if rows is not None and positions_T.device.type == "cpu":
            try:  # a GPU would not raise, and here looking for the largest position first costs as much as the lookup
                return tuple(part.index_select(0, positions_T)[:, None] for part in rows)  # type: ignore[return-value]
            except IndexError:
                pass
        needed = int(positions_T.max()) + 1 if positions_T.numel() else 0
        cos, sin = self.first(max(needed, 1), positions_T.device)
        return cos[positions_T, None], sin[positions_T, None]

    def first(self, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return cos and sin ``[rows, rotary_dim / 2]`` fp32 with at least ``length`` rows."""
        rows = self._rows.get(device)
        if rows is None or rows[0].shape[0] < length:
            # Computed on the CPU for every device: one set of bits, whatever the device's cosine does.
            angles = torch.arange(1 << (length - 1).bit_length(), dtype=torch.float32)[:, None] * self.inverse
            rows = (angles.cos().to(device), angles.sin().to(device))
            self._rows[device] = rows
        return rows


def rotate(states_TNH: Tensor, cos_T1R: Tensor, sin_T1R: Tensor) -> Tensor:
    """Return the rotated states in the input's dtype, computed in fp32 and rounded once.

    Args:
        states_TNH: ``[..., N, H]`` queries or keys; halves are rotated as pairs ``(i, i + R/2)`` (NeoX layout).
        cos_T1R: broadcastable to ``[..., N, R / 2]`` fp32.
        sin_T1R: as ``cos_T1R``.

    Every element is a function of its own row alone, so results do not depend on batch size, order or length.
    Differentiable in ``states_TNH``.
    """
    half = cos_T1R.shape[-1]
    first, second = states_TNH[..., :half].float(), states_TNH[..., half : 2 * half].float()
    rotated = torch.cat((first * cos_T1R - second * sin_T1R, second * cos_T1R + first * sin_T1R), dim=-1)
    rotated = rotated.to(states_TNH.dtype)
    return rotated if states_TNH.shape[-1] == 2 * half else torch.cat((rotated, states_TNH[..., 2 * half :]), dim=-1)
