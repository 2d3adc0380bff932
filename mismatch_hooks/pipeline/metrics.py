"""How far training and rollout log-probs of the same tokens lie apart: exact, over raw ratios, mergeable across ranks.

``measure`` turns one micro-batch into a ``MetricState``, ``merge`` joins the states of micro-batches and ranks, and
``MetricState.finalize`` divides, once. A state keeps every difference (8 bytes a token), because quantiles of the whole
step cannot be rebuilt from the quantiles of its parts. ``metric_table`` says what each metric is and how it misleads.

dlogp is training − rollout in nats, ratio is exp(dlogp). Arithmetic is fp64. Masks select, they never multiply:
``inf * 0`` is NaN. Ratios are neither clamped nor truncated; where fp64 itself overflows (dlogp above 709.78) the value
is ``inf`` and ``ratio_overflow`` counts it.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from mismatch_hooks.pipeline.metric_table import METRICS

LARGEST_EXPONENT = math.log(math.nextafter(math.inf, 0.0))
"""The largest dlogp whose ratio is a finite fp64 number, 709.78 nats."""

HEALTHY_PROB_DIFF_MEAN = 0.005
"""What other dashboards call healthy for the mean of |exp(training) − exp(rollout)| (dense models, bf16)."""

ANONYMOUS = -1
"""The sequence id of a row that no other state continues."""


class MetricInputError(ValueError):
    """The inputs cannot be measured as given."""


class DtypeError(MetricInputError):
    """A tensor is stored in a type that cannot carry the metric; the caller has to recompute it, not to cast it."""


class ShapeError(MetricInputError):
    """The inputs do not describe the same tokens."""


_BLOCK_TOKENS = 2**18  # rows are measured in blocks: fp64 temporaries of a whole 512×4096 batch took twice as long

_COUNTS = ("tokens", "sequences", "nonfinite", "clipped", "ratio_overflow")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MetricState:
    """What one micro-batch, rank or step has measured; undivided, so that states merge. Made by ``measure``.

    Attributes:
        epsilon_low: the clip range is [1 − epsilon_low, 1 + epsilon_high].
        epsilon_high: see ``epsilon_low``.
        dlogp: ``[tokens]`` fp64, nats, CPU; every finite training − rollout, in no particular order.
        sequence_ids: ``[sequences]`` int64; −1 where the sequence has no slice in another state.
        sequence_tokens: ``[sequences]`` int64, at least 1.
        sequence_dlogp_sums: ``[sequences]`` fp64, nats.
        nonfinite: active tokens that are not in ``dlogp``.
        equal: active tokens with one finite value, to the bit, on both sides.
        clipped_signed: counted tokens where PPO clipping drops the gradient.
        without_advantage: counted tokens whose advantage was not given or is NaN.
        prob_diff_sum: sum of |exp(training) − exp(rollout)| over ``dlogp``'s tokens.
    """

    epsilon_low: float
    epsilon_high: float
    dlogp: Tensor
    sequence_ids: Tensor
    sequence_tokens: Tensor
    sequence_dlogp_sums: Tensor
    nonfinite: int
    equal: int
    clipped_signed: int
    without_advantage: int
    prob_diff_sum: float

    def finalize(
        self, *, healthy_dlogp_mean: float | None = None, healthy_prob_diff_mean: float = HEALTHY_PROB_DIFF_MEAN
    ) -> dict[str, float | int]:
        """Return the metrics, one value per key of ``METRICS``; NaN, never 0.0, for all but counts without tokens.

        Counts are ints, flags bools, the rest floats. Counts, shares of counts, maxima and quantiles do not depend on
        how the tokens were split or ordered, to the bit; means do not to fp64 rounding, n · 2⁻⁵³ of the mean magnitude.

        Args:
            healthy_dlogp_mean: nats; the largest dlogp_mean that somebody who watches only the mean would pass.
                None leaves the judgement of ``is_silent_failure`` to the probability difference.
            healthy_prob_diff_mean: the same for ``prob_diff_mean``.
        """
        if self.dlogp.numel() == 0:
            counts = dict.fromkeys(_COUNTS, 0) | {"nonfinite": self.nonfinite}
            return {name: counts.get(name, math.nan) for name in METRICS}
        dlogp, tokens = self.dlogp, self.dlogp.numel()
        magnitude = dlogp.abs()
        smallest, largest = (float(edge) for edge in torch.aminmax(dlogp))
        positive, negative = _count(dlogp > 0), _count(dlogp < 0)
        clipped = _count(dlogp > math.log1p(self.epsilon_high)) + _count(dlogp < math.log1p(-self.epsilon_low))
        signed_mean = _mean(dlogp)
        # Weights relative to the largest one: neither they nor their squares overflow, whatever dlogp is.
        weight = (dlogp - largest).exp_()
        weight_mean, weight_square_mean = _mean(weight), float(torch.dot(weight, weight)) / tokens
        p50, p99, p999 = _quantiles_per_mille(magnitude, (500, 990, 999))
        clip_fraction, dlogp_mean, prob_diff_mean = clipped / tokens, _mean(magnitude), self.prob_diff_sum / tokens
        mean_looks_healthy = prob_diff_mean <= healthy_prob_diff_mean or (
            healthy_dlogp_mean is not None and dlogp_mean <= healthy_dlogp_mean
        )
        return {
            "tokens": tokens,
            "sequences": self.sequence_ids.numel(),
            "nonfinite": self.nonfinite,
            "clipped": clipped,
            "clip_fraction": clip_fraction,
            "clip_fraction_signed": math.nan if self.without_advantage else self.clipped_signed / tokens,
            "dlogp_mean": dlogp_mean,
            "dlogp_signed_mean": signed_mean,
            "dlogp_p50": p50,
            "dlogp_p99": p99,
            "dlogp_p999": p999,
            "dlogp_max": float(magnitude.max()),
            "ratio_mean": _exp(largest + math.log(weight_mean)),
            "ratio_max": _exp(largest),
            "ratio_overflow": _count(dlogp > LARGEST_EXPONENT) if largest > LARGEST_EXPONENT else 0,
            "k1": 0.0 - signed_mean,
            "k3": _mean(dlogp.expm1().sub_(dlogp)),
            "ppl_ratio": _mean_of_exp(-self.sequence_dlogp_sums / self.sequence_tokens),
            "chi2_token": _expm1(2.0 * largest + math.log(weight_square_mean)),
            "ess": weight_mean * weight_mean / weight_square_mean,
            "prob_diff_mean": prob_diff_mean,
            "bitwise_fraction": self.equal / (tokens + self.nonfinite),
            "same_sign_fraction": max(positive, negative) / (positive + negative) if positive + negative else math.nan,
            "constant_difference": tokens > 1 and smallest == largest != 0.0,
            "is_silent_failure": clipped > 0 and mean_looks_healthy,
        }

    def to_plain(self) -> dict[str, Any]:
        """Return numbers and lists of numbers only: ready for JSON, a server or a gather without pickle."""
        plain = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value.tolist() if isinstance(value, Tensor) else value for name, value in plain.items()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Return the state that ``to_plain`` wrote, bit for bit.

        Raises:
            MetricInputError: keys are missing or unknown, or lists of one length differ.
        """
        names = [field.name for field in fields(cls)]
        if set(plain) != set(names):
            raise MetricInputError(f"a metric state has the keys {sorted(plain)}; it takes exactly {sorted(names)}.")
        values = dict(plain)
        for name, dtype in _STATE_TENSORS.items():
            values[name] = torch.tensor(values[name], dtype=dtype)
        sizes = {name: values[name].numel() for name in _STATE_TENSORS if name != "dlogp"}
        if len(set(sizes.values())) != 1:
            raise MetricInputError(f"a metric state has lists of {sizes}; all three describe the same sequences.")
        return cls(**values)


_STATE_TENSORS = {
    "dlogp": torch.float64,
    "sequence_ids": torch.int64,
    "sequence_tokens": torch.int64,
    "sequence_dlogp_sums": torch.float64,
}


def measure(
    training_logprobs: Tensor,
    rollout_logprobs: Tensor,
    response_mask: Tensor,
    *,
    epsilon_low: float,
    epsilon_high: float,
    advantages: Tensor | None = None,
    sequence_ids: Tensor | None = None,
) -> MetricState:
    """Measure one micro-batch, before the first optimizer step. Reads its inputs only; draws no random number.

    Args:
        training_logprobs: ``[batch, response]`` fp32 or fp64, nats, ``TRAINING_FULL_PREFILL``.
        rollout_logprobs: ``[batch, response]`` fp32 or fp64, nats; the same tokens and weights.
        response_mask: ``[batch, response]`` bool, or integers that are all 0 or 1; true on active tokens.
        epsilon_low: the clip range is [1 − epsilon_low, 1 + epsilon_high]; at least 0, below 1.
        epsilon_high: at least 0; as read back from the loop.
        advantages: ``[batch]`` or ``[batch, response]``; only the sign counts. None: ``clip_fraction_signed`` is NaN.
        sequence_ids: ``[batch]`` integers of 0 or more, the same for slices of one sequence that different ranks hold
            (context parallel). None: each row is a sequence of its own.

    Raises:
        DtypeError: log-probs are stored below fp32, or the mask is neither bool nor integer.
        ShapeError: the shapes do not agree.
        MetricInputError: an epsilon, a mask value or a sequence id is out of its range.
    """
    _require_epsilons(epsilon_low, epsilon_high)
    active = _require_tokens(training_logprobs, rollout_logprobs, response_mask)
    advantage = None if advantages is None else _per_token(advantages, training_logprobs)
    ids = _require_ids(sequence_ids, batch=active.shape[0])

    clip_range = _ClipRange(epsilon_low=float(epsilon_low), epsilon_high=float(epsilon_high))
    batch, response = active.shape
    rows = max(1, _BLOCK_TOKENS // max(1, response))
    return merge(
        _measure_block(
            training_logprobs[start : start + rows].detach().double(),
            rollout_logprobs[start : start + rows].detach().to(active.device).double(),
            active[start : start + rows],
            None if advantage is None else advantage[start : start + rows],
            ids[start : start + rows],
            clip_range,
        )
        for start in range(0, max(1, batch), rows)
    )


def merge(states: Iterable[MetricState]) -> MetricState:
    """Return the state of all tokens of ``states`` together; an empty state changes nothing.

    Raises:
        MetricInputError: there is no state, or two states have different clip ranges.
    """
    parts = tuple(states)
    if not parts:
        raise MetricInputError("merge got no metric state; give it one per micro-batch or rank, empty ones included.")
    first = parts[0]
    for part in parts:
        if (part.epsilon_low, part.epsilon_high) != (first.epsilon_low, first.epsilon_high):
            raise MetricInputError(
                f"merge got epsilon_low, epsilon_high = {part.epsilon_low}, {part.epsilon_high} beside "
                f"{first.epsilon_low}, {first.epsilon_high}; counts add up only under one clip range, so measure all "
                "micro-batches and ranks with the loop's own."
            )
    tensors = {name: torch.cat([getattr(part, name) for part in parts]) for name in _STATE_TENSORS}
    return _one_row_per_sequence(
        MetricState(
            epsilon_low=first.epsilon_low,
            epsilon_high=first.epsilon_high,
            nonfinite=sum(part.nonfinite for part in parts),
            equal=sum(part.equal for part in parts),
            clipped_signed=sum(part.clipped_signed for part in parts),
            without_advantage=sum(part.without_advantage for part in parts),
            prob_diff_sum=math.fsum(part.prob_diff_sum for part in parts),
            **tensors,
        )
    )


class LogprobTensors(NamedTuple):
    """Padded tensors for ``measure``: two fp64 log-probs and a bool mask, each ``[batch, longest response]``."""

    training_logprobs: Tensor
    rollout_logprobs: Tensor
    response_mask: Tensor


def from_lists(
    training_logprobs: Sequence[Sequence[float | None]],
    rollout_logprobs: Sequence[Sequence[float | None]],
    response_mask: Sequence[Sequence[bool | int]] | None = None,
) -> LogprobTensors:
    """Return ragged lists, as JSON holds them, as right-padded tensors; None (JSON's null) becomes NaN, not 0.

    Args:
        training_logprobs: nats, one list a sequence, one value a response token.
        rollout_logprobs: the same tokens.
        response_mask: true on active tokens; None: every token of the lists is active. Padding never is.

    Raises:
        ShapeError: the lists do not pair up; nothing is cut to the shorter or padded to the longer.
        MetricInputError: a mask entry is neither a bool nor 0 or 1.
    """
    columns: dict[str, Sequence[Sequence[Any]]] = {
        "training_logprobs": training_logprobs,
        "rollout_logprobs": rollout_logprobs,
        "response_mask": [[True] * len(row) for row in training_logprobs] if response_mask is None else response_mask,
    }
    for name, rows in columns.items():
        if len(rows) != len(training_logprobs):
            raise ShapeError(
                f"{name} has {len(rows)} sequences, training_logprobs {len(training_logprobs)}; pass one list for each."
            )
        for sequence, (row, training_row) in enumerate(zip(rows, training_logprobs, strict=True)):
            if len(row) != len(training_row):
                raise ShapeError(
                    f"sequence {sequence}: {len(row)} {name} for {len(training_row)} training_logprobs; one of each "
                    "belongs to every token, so pass both lists uncut and unpadded."
                )
    for sequence, row in enumerate(columns["response_mask"]):
        if any(entry not in (0, 1) for entry in row):
            raise MetricInputError(f"response_mask of sequence {sequence} is {row!r}; it accepts bools, or 0 and 1.")
    longest = max((len(row) for row in training_logprobs), default=0)
    return LogprobTensors(
        training_logprobs=_padded(training_logprobs, longest),
        rollout_logprobs=_padded(rollout_logprobs, longest),
        response_mask=_padded(columns["response_mask"], longest) == 1.0,
    )


class WorstToken(NamedTuple):
    """One token for a report: its row, its response position, and training − rollout in nats."""

    sequence: int
    position: int
    dlogp: float


def worst_tokens(
    training_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor, *, k: int = 10
) -> tuple[WorstToken, ...]:
    """Return up to ``k`` active tokens with the largest finite |dlogp|, largest first, ties by row and position.

    Non-finite tokens are not ranked; ``nonfinite`` counts them.

    Args:
        training_logprobs: ``[batch, response]`` fp32 or fp64, nats.
        rollout_logprobs: ``[batch, response]`` fp32 or fp64, nats.
        response_mask: ``[batch, response]`` bool, or integers that are all 0 or 1.
        k: at least 1.

    Raises:
        DtypeError, ShapeError, MetricInputError: as ``measure``.
    """
    if isinstance(k, bool) or k < 1:
        raise MetricInputError(f"k: got {k!r}; accepts an integer of 1 or more.")
    active = _require_tokens(training_logprobs, rollout_logprobs, response_mask)
    dlogp = training_logprobs.detach().double() - rollout_logprobs.detach().to(active.device).double()
    counted = dlogp.isfinite().logical_and_(active)
    positions = counted.flatten().nonzero().squeeze(1)
    found = dlogp.flatten()[positions]
    magnitude = found.abs()
    if positions.numel() > k:
        # topk alone may keep any of several equal values; the stable sort below keeps the first.
        near = magnitude >= torch.topk(magnitude, k).values[-1]
        positions, found, magnitude = positions[near], found[near], magnitude[near]
    order = torch.argsort(magnitude, descending=True, stable=True)[:k]
    width = dlogp.shape[1]
    return tuple(
        WorstToken(sequence=position // width, position=position % width, dlogp=value)
        for position, value in zip(positions[order].tolist(), found[order].tolist(), strict=True)
    )


class _ClipRange(NamedTuple):
    epsilon_low: float
    epsilon_high: float


def _measure_block(
    training: Tensor, rollout: Tensor, active: Tensor, advantage: Tensor | None, ids: Tensor, clip_range: _ClipRange
) -> MetricState:
    """Measure checked rows: fp64 log-probs, bool mask and the advantage of each token, all ``[rows, response]``."""
    dlogp = training - rollout
    counted = dlogp.isfinite().logical_and_(active)
    tokens_per_row = counted.sum(dim=1).cpu()
    present, tokens = tokens_per_row > 0, int(tokens_per_row.sum())
    # To the bit: equal values of another sign (−0.0 and 0.0) differ.
    equal = (training.view(torch.int64) == rollout.view(torch.int64)).logical_and_(counted)
    prob_diff = training.exp().sub_(rollout.exp()).abs_()
    clipped_signed, without_advantage = 0, tokens
    if advantage is not None:
        dropped = (dlogp > math.log1p(clip_range.epsilon_high)) & (advantage > 0)
        dropped |= (dlogp < math.log1p(-clip_range.epsilon_low)) & (advantage < 0)
        clipped_signed = _count(dropped & counted)
        without_advantage = _count(advantage.isnan() & counted)
    return MetricState(
        epsilon_low=clip_range.epsilon_low,
        epsilon_high=clip_range.epsilon_high,
        dlogp=torch.masked_select(dlogp, counted).cpu(),
        sequence_ids=ids[present],
        sequence_tokens=tokens_per_row[present],
        sequence_dlogp_sums=torch.where(counted, dlogp, 0.0).sum(dim=1).cpu()[present],
        nonfinite=_count(active) - tokens,
        equal=_count(equal),
        clipped_signed=clipped_signed,
        without_advantage=without_advantage,
        prob_diff_sum=float(torch.where(counted, prob_diff, 0.0).sum()),
    )


def _count(where: Tensor) -> int:
    return int(torch.count_nonzero(where))


def _mean(terms: Tensor) -> float:
    # Divides first: a mean of finite terms is finite, though their sum may not be.
    return float((terms / terms.numel()).sum())


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent <= LARGEST_EXPONENT else math.inf


def _expm1(exponent: float) -> float:
    return math.expm1(exponent) if exponent <= LARGEST_EXPONENT else math.inf


def _mean_of_exp(exponents: Tensor) -> float:
    largest = float(exponents.max())
    return _exp(largest + math.log(_mean((exponents - largest).exp_())))


def _quantiles_per_mille(values: Tensor, per_mille: Sequence[int]) -> list[float]:
    """Return quantiles with linear interpolation between order statistics; ranks are exact integers."""
    last = values.numel() - 1
    ranks = [divmod(last * share, 1000) for share in per_mille]
    kth = sorted({min(rank + step, last) for rank, _ in ranks for step in (0, 1)})
    ordered = np.partition(values.numpy(), kth)
    quantiles = []
    for rank, thousandths in ranks:
        low, high = float(ordered[rank]), float(ordered[min(rank + 1, last)])
        quantiles.append(low + (high - low) * (thousandths / 1000))
    return quantiles


def _one_row_per_sequence(state: MetricState) -> MetricState:
    """Join the slices of each named sequence; anonymous rows stay as they are."""
    named = state.sequence_ids != ANONYMOUS
    if not bool(named.any()):
        return state
    ids, slot = torch.unique(state.sequence_ids[named], return_inverse=True)
    joined: dict[str, Any] = {"sequence_ids": torch.cat([ids, state.sequence_ids[~named]])}
    for name in ("sequence_tokens", "sequence_dlogp_sums"):
        column: Tensor = getattr(state, name)
        sums = torch.zeros(ids.numel(), dtype=column.dtype).index_add_(0, slot, column[named])
        joined[name] = torch.cat([sums, column[~named]])
    return replace(state, **joined)


def _padded(rows: Sequence[Sequence[Any]], longest: int) -> Tensor:
    filled = [
        [math.nan if value is None else value for value in row] + [math.nan] * (longest - len(row)) for row in rows
    ]
    return torch.tensor(filled, dtype=torch.float64).reshape(len(rows), longest)


def _require_epsilons(epsilon_low: float, epsilon_high: float) -> None:
    for name, given, limit in (("epsilon_low", epsilon_low, 1.0), ("epsilon_high", epsilon_high, math.inf)):
        if isinstance(given, bool) or not 0.0 <= given < limit:
            accepted = "a number from 0 to below 1" if limit == 1.0 else "a finite number of 0 or more"
            raise MetricInputError(f"{name}: got {given!r}; accepts {accepted}, the clip range as the loop uses it.")


def _require_tokens(training_logprobs: Tensor, rollout_logprobs: Tensor, response_mask: Tensor) -> Tensor:
    """Return the mask as bool, on the device of ``training_logprobs``, once all three describe the same tokens."""
    for name, logprobs in (("training_logprobs", training_logprobs), ("rollout_logprobs", rollout_logprobs)):
        if logprobs.dtype not in (torch.float32, torch.float64):
            raise DtypeError(
                f"{name} is {logprobs.dtype}; accepts float32 or float64, computed that way and not cast afterwards: "
                "a bf16 log-prob near -5 has a spacing of 0.03, so differences would be quantisation noise."
            )
    shapes = [list(tensor.shape) for tensor in (training_logprobs, rollout_logprobs, response_mask)]
    if len(shapes[0]) != 2 or shapes[1] != shapes[0] or shapes[2] != shapes[0]:
        raise ShapeError(
            f"training_logprobs is {shapes[0]}, rollout_logprobs {shapes[1]}, response_mask {shapes[2]}; all three are "
            "one [batch, response], so align them by token, never by cutting or padding one of them."
        )
    if response_mask.dtype.is_floating_point or response_mask.dtype.is_complex:
        raise DtypeError(f"response_mask is {response_mask.dtype}; accepts bool, or integers that are all 0 or 1.")
    mask = response_mask.detach().to(training_logprobs.device)
    if mask.dtype is torch.bool:
        return mask
    active = mask == 1
    if _count(mask) != _count(active):
        raise MetricInputError(
            f"response_mask holds {mask[mask.ne(0) & mask.ne(1)][0].item()}; accepts bool, or integers that are all 0 "
            "or 1: weights and segment ids are not masks."
        )
    return active


def _per_token(advantages: Tensor, training_logprobs: Tensor) -> Tensor:
    batch, response = training_logprobs.shape
    given = advantages.detach().to(training_logprobs.device)
    if list(given.shape) == [batch]:
        return given.unsqueeze(1).expand(batch, response)
    if list(given.shape) == [batch, response]:
        return given
    raise ShapeError(
        f"advantages is {list(given.shape)}; accepts [{batch}], one a sequence, or [{batch}, {response}], one a token."
    )


def _require_ids(sequence_ids: Tensor | None, *, batch: int) -> Tensor:
    if sequence_ids is None:
        return torch.full((batch,), ANONYMOUS, dtype=torch.int64)
    ids = sequence_ids.detach().cpu()
    if list(ids.shape) != [batch]:
        raise ShapeError(f"sequence_ids is {list(ids.shape)}; accepts [{batch}], one a row of the log-probs.")
    if ids.dtype.is_floating_point or ids.dtype.is_complex or ids.dtype is torch.bool or bool((ids < 0).any()):
        raise MetricInputError(f"sequence_ids is {ids.tolist()} ({ids.dtype}); accepts integers of 0 or more.")
    return ids.long()
