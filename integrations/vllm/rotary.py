"""Which rotary base a live cos/sin table stands for; the configuration only says what was asked for."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Positions compared; a multiple of every vector width, so that no cosine is taken by another code path.
_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class ImpliedFrequencies:
    """What a table implies.

    Attributes:
        frequencies: ``[rotary_dim / 2]`` fp32 radians per position.
        theta: the rotary base.
        exact: True when these frequencies give the live table bit for bit; otherwise they are an estimate.
        why: how they were found.
    """

    frequencies: Tensor
    theta: float
    exact: bool
    why: str


def implied_inverse_frequencies(rotary: Any) -> ImpliedFrequencies:
    """Return the inverse frequencies and the base that the live table of a rotary module implies.

    The module's own recipe is tried first, then plain bases near the one measured on the table, roundest first.
    """
    live: Tensor = rotary.cos_sin_cache
    with torch.no_grad(), torch.device(live.device):
        own = rotary._compute_cos_sin_cache().to(live.dtype)
        if own.shape != live.shape or not torch.equal(own, live):
            return _measured(live, rotary.rotary_dim)
        theta, rows = float(rotary.base), live[:_ROWS]
        frequencies: Tensor = rotary._compute_inv_freq(rotary.base)
        if torch.equal(_table(frequencies, rows.shape[0]).to(live.dtype), rows):
            why = "the table is the one that its module computes"
            return ImpliedFrequencies(frequencies=frequencies, theta=theta, exact=True, why=why)
        why = f"{type(rotary).__name__} scales its table as well as its frequencies; they are measured on the table"
        return ImpliedFrequencies(frequencies=_unwrapped_frequencies(rows).float(), theta=theta, exact=False, why=why)


def _measured(live: Tensor, rotary_dim: int) -> ImpliedFrequencies:
    rows = live[:_ROWS]
    frequencies = _unwrapped_frequencies(rows)
    # The base from each frequency but the first (which is 1 whatever the base); the steepest ones are read best.
    exponents = torch.arange(2, rotary_dim, 2, dtype=torch.float64, device=live.device) / rotary_dim
    bases = (-frequencies[1:].log() / exponents).exp()
    weights = frequencies[1:] * exponents
    theta = float((bases.log() * weights**2).sum().div((weights**2).sum()).exp())
    for candidate in _round_first(theta):
        powers = torch.arange(0, rotary_dim, 2, dtype=torch.float, device=live.device) / rotary_dim
        exact = 1.0 / (candidate**powers)
        if torch.equal(_table(exact, rows.shape[0]).to(live.dtype), rows):
            return ImpliedFrequencies(
                frequencies=exact, theta=candidate, exact=True, why=f"the table is that of base {candidate:g}"
            )
    return ImpliedFrequencies(
        frequencies=frequencies.float(),
        theta=theta,
        exact=False,
        why="the live table is neither its module's own nor that of a plain base; measured on the table",
    )


def _table(frequencies: Tensor, positions: int) -> Tensor:
    steps = torch.arange(positions, dtype=torch.float, device=frequencies.device)
    angles = torch.einsum("i,j -> ij", steps, frequencies)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


def _unwrapped_frequencies(table: Tensor) -> Tensor:
    """``[rotary_dim / 2]`` fp64 radians per position: each doubling of the position halves the rounding error."""
    cosine, sine = table.double().chunk(2, dim=-1)
    angle = torch.atan2(sine, cosine)
    frequency = angle[1]
    position = 2
    while position < table.shape[0]:
        turns = ((frequency * position - angle[position]) / (2 * math.pi)).round()
        frequency = (angle[position] + 2 * math.pi * turns) / position
        position *= 2
    return frequency.clamp_min(1e-12)


def _round_first(theta: float) -> Iterator[float]:
    magnitude = math.floor(math.log10(theta))
    seen: set[float] = set()
    for digits in range(6):
        step = 10.0 ** (magnitude - digits)
        # A bf16 table gives the base to about one part in ten thousand.
        reach = max(1, min(16, math.ceil(2e-4 * theta / step)))
        for offset in sorted(range(-reach, reach + 1), key=abs):
            candidate = (round(theta / step) + offset) * step
            if candidate > 1 and candidate not in seen:
                seen.add(candidate)
                yield candidate
