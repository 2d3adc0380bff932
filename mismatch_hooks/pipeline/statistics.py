"""Paired comparison of an arm with ``both_native`` on the same tokens, clustered by sequence."""

import math

import numpy as np
from scipy import stats

from mismatch_hooks.pipeline.score import ArmTokens, FloatArray
from mismatch_hooks.schema.enums import Arm
from mismatch_hooks.schema.verdict import PairedEffect

# Three arms are compared for every factor; a family-wise 1 % makes one false accusation in a hundred factors at most.
FAMILY_LEVEL = 0.01
LEVEL = FAMILY_LEVEL / 3
POWER = 0.8
# A change is worth naming when it is at least this share of the native mismatch; smaller ones are re-drawn rounding.
RELEVANT_SHARE = 0.1
_RESAMPLES = 4_999
# Up to 13 sequences every sign assignment is enumerated; with more, this many are drawn (p is then at least 1e-4).
_SIGN_FLIPS = 9_999


def paired_effect(
    arm: Arm, changed: ArmTokens, native: ArmTokens, *, epsilon_low: float, epsilon_high: float
) -> PairedEffect:
    """Compare one arm with ``both_native``, token by token.

    Tokens of one sequence are not independent: intervals and p-values are built on per-sequence sums. The sign-flip
    test is exact: if the arm changed nothing, each sequence's sum is as likely positive as negative. With C sequences
    its smallest p-value is 2 / 2^C, so fewer than 10 sequences can never reach the level.

    Args:
        arm: which arm ``changed`` is.
        changed: the arm's tokens.
        native: ``both_native``'s tokens, in the same order.
        epsilon_low: clip range.
        epsilon_high: clip range.
    """
    change = np.abs(changed.dlogp) - np.abs(native.dlogp)
    was_clipped = _clipped(native.dlogp, epsilon_low, epsilon_high)
    is_clipped = _clipped(changed.dlogp, epsilon_low, epsilon_high)
    removed, added = int((was_clipped & ~is_clipped).sum()), int((is_clipped & ~was_clipped).sum())

    clusters, index = np.unique(native.sequence, return_inverse=True)
    counts = np.bincount(index).astype(np.float64)
    sums = np.bincount(index, weights=change).astype(np.float64)
    clip_change = is_clipped.astype(np.float64) - was_clipped.astype(np.float64)
    clip_sums = np.bincount(index, weights=clip_change).astype(np.float64)
    tokens, mean = int(counts.sum()), float(sums.sum() / counts.sum())
    resolvable = _resolvable(sums, counts, mean)
    native_mismatch = float(np.abs(native.dlogp).mean())
    return PairedEffect(
        arm=arm,
        tokens=tokens,
        sequences=len(clusters),
        dlogp_change=mean,
        interval=_interval(sums, counts),
        p_value=_sign_flip_p_value(sums),
        clip_events_removed=removed,
        clip_events_added=added,
        clip_p_value=stats.binomtest(removed, removed + added, 0.5).pvalue if removed + added else 1.0,
        clip_clustered_p_value=_sign_flip_p_value(clip_sums),
        resolvable=resolvable,
        tokens_needed=_tokens_needed(tokens, resolvable, native_mismatch),
        bits_changed=int(
            (_bits(changed.training) != _bits(native.training)).sum()
            + (_bits(changed.rollout) != _bits(native.rollout)).sum()
        ),
    )


def _clipped(dlogp: FloatArray, epsilon_low: float, epsilon_high: float) -> np.ndarray:
    outside: np.ndarray = (dlogp > math.log1p(epsilon_high)) | (dlogp < math.log1p(-epsilon_low))
    return outside


def _bits(values: FloatArray) -> np.ndarray:
    return values.view(np.int64)


def _sign_flip_p_value(sums: FloatArray) -> float:
    if len(sums) < 2 or not np.any(sums):  # one sign flipped or not is as likely either way
        return 1.0
    result = stats.permutation_test(
        (sums,),
        lambda flipped, axis: flipped.sum(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=_SIGN_FLIPS,
        batch=4096,
        rng=np.random.default_rng(0),  # our own stream: the run's are never touched
    )
    return float(result.pvalue)


def _interval(sums: FloatArray, counts: FloatArray) -> tuple[float, float]:
    if len(sums) < 2:
        return (-math.inf, math.inf)
    result = stats.bootstrap(
        (sums, counts),
        lambda s, n, axis: s.sum(axis=axis) / n.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=1 - LEVEL,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def _resolvable(sums: FloatArray, counts: FloatArray, mean: float) -> float:
    """Smallest change that is found with the stated power: (t₁₋ₐ/₂ + t_power) × the cluster-robust standard error.

    The standard error is that of a ratio of cluster sums (Cochran 1977, eq. 2.46) with C − 1 degrees of freedom.
    """
    clusters = len(sums)
    if clusters < 2:
        return math.inf
    residual = sums - mean * counts
    error = math.sqrt(clusters / (clusters - 1) * float(residual @ residual)) / float(counts.sum())
    quantiles = stats.t.ppf([1 - LEVEL / 2, POWER], df=clusters - 1)
    return float(quantiles.sum()) * error


def _tokens_needed(tokens: int, resolvable: float, native_mismatch: float) -> int | None:
    if not math.isfinite(resolvable) or native_mismatch == 0.0 or not math.isfinite(native_mismatch):
        return None
    # The standard error shrinks with the square root of the tokens.
    return max(1, math.ceil(tokens * (resolvable / (RELEVANT_SHARE * native_mismatch)) ** 2))
