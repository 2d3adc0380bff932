"""What every metric is and how it can mislead: formula, unit, meaning and trap, in the order of a step's event."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricInfo:
    """What one metric is.

    Attributes:
        formula: over active tokens with a finite dlogp (Δ); ρ = exp(Δ); t training, r rollout.
        unit: ``nats``, ``tokens``, ``sequences``, ``share`` (0 to 1), ``ratio`` or ``bool``.
        meaning: what it shows.
        trap: how it misleads.
    """

    formula: str
    unit: str
    meaning: str
    trap: str


def _info(formula: str, unit: str, meaning: str, trap: str) -> MetricInfo:
    return MetricInfo(formula=formula, unit=unit, meaning=meaning, trap=trap)


METRICS: dict[str, MetricInfo] = {
    "tokens": _info(
        "count of active tokens with finite Δ",
        "tokens",
        "the denominator of every mean here",
        "0 makes every other value NaN: not measured is not 0.0, which looks perfect",
    ),
    "sequences": _info(
        "count of sequences with at least one such token",
        "sequences",
        "the denominator of ppl_ratio",
        "a sequence split over ranks counts once only when its slices carry its sequence id",
    ),
    "nonfinite": _info(
        "count of active tokens where t, r or Δ is NaN or infinite",
        "tokens",
        "values that were lost; excluded from every other metric",
        "turned into 0 or 1 they vanish; above 0 the step's verdicts are void",
    ),
    "clipped": _info(
        "count of Δ > log1p(ε_high) or Δ < log1p(−ε_low)",
        "tokens",
        "the events behind clip_fraction; alerts are binomial over these",
        "a few hundred tokens give a handful of events",
    ),
    "clip_fraction": _info(
        "clipped / tokens",
        "share",
        "tokens whose ratio lies outside [1−ε_low, 1+ε_high] before the first optimizer step",
        "not PPO's clip fraction of later minibatches; 0 under wrong rope factors, stale tensors and renormalisation",
    ),
    "clip_fraction_signed": _info(
        "share of (A > 0 and Δ > log1p(ε_high)) or (A < 0 and Δ < log1p(−ε_low))",
        "share",
        "tokens whose gradient PPO clipping drops, given the advantage A",
        "NaN unless every counted token has an advantage that is not NaN",
    ),
    "dlogp_mean": _info(
        "mean |Δ|",
        "nats",
        "the usual mismatch figure",
        "pooled over tokens; a mean per rollout or per rank weights short sequences up. Far below the clip edge while "
        "the tail loses gradient",
    ),
    "dlogp_signed_mean": _info("mean Δ", "nats", "bias: one side is systematically surer", "opposite signs cancel"),
    "dlogp_p50": _info("median of |Δ|, linear interpolation", "nats", "the typical token", "blind to the tail"),
    "dlogp_p99": _info("0.99 quantile of |Δ|", "nats", "the tail", "under 100 tokens it is close to the maximum"),
    "dlogp_p999": _info("0.999 quantile of |Δ|", "nats", "the far tail", "under 1,000 tokens it is the maximum"),
    "dlogp_max": _info("max |Δ|", "nats", "the worst token", "grows with the number of tokens"),
    "ratio_mean": _info(
        "mean ρ", "ratio", "1 when rollout samples from the distribution it reports", "one outlier token dominates it"
    ),
    "ratio_max": _info("max ρ", "ratio", "largest weight", "over raw ratios; after truncation it equals the threshold"),
    "ratio_overflow": _info(
        "count of Δ > 709.78",
        "tokens",
        "tokens whose ratio exceeds fp64; ratio_max, and with it ratio_mean, k3 and chi2_token, may be inf",
        "their Δ is finite and stays in the dlogp metrics",
    ),
    "k1": _info("mean (r − t)", "nats", "KL(rollout, training), first estimator", "signed: cancels"),
    "k3": _info(
        "mean (expm1(Δ) − Δ)",
        "nats",
        "KL(rollout, training), third estimator (approx_kl); every term is at least 0",
        "unclamped here, clamped at ±10 or ±20 elsewhere; accurate to 2⁻⁵² · mean|Δ| absolutely",
    ),
    "ppl_ratio": _info(
        "mean over sequences of exp(mean (r − t))",
        "ratio",
        "perplexity of training over that of rollout",
        "weighted per sequence, unlike the rest; above 1 means that training is less sure",
    ),
    "chi2_token": _info(
        "mean ρ² − 1",
        "ratio",
        "variance of the importance weights",
        "not the per-sequence chi2 that others log under the same key; clamped elsewhere",
    ),
    "ess": _info(
        "(mean ρ)² / mean ρ²",
        "share",
        "effective sample size over tokens",
        "over clamped weights, as elsewhere, it is optimistic",
    ),
    "prob_diff_mean": _info(
        "mean |exp(t) − exp(r)|",
        "share",
        "what other dashboards show as the mismatch; here for comparison only",
        "hides low-probability tokens: 1.3e-4 where half of the tokens are clipped",
    ),
    "bitwise_fraction": _info(
        "share of active tokens, non-finite ones included, with the same finite value; −0.0 is not 0.0",
        "share",
        "1 is the proof of alignment",
        "also 1 when one side is a copy of the other and nothing was compared",
    ),
    "same_sign_fraction": _info(
        "max(count Δ > 0, count Δ < 0) / count Δ ≠ 0",
        "share",
        "1 under renormalisation and padded vocabularies, about 0.5 under rounding",
        "NaN when no Δ differs from 0; near 1 by chance on few tokens",
    ),
    "constant_difference": _info(
        "min Δ = max Δ ≠ 0, to the bit, over at least two tokens",
        "bool",
        "one offset on every token: a convention, not numerics",
        "False for an offset that went through fp32 rounding: then compare dlogp_p50 with dlogp_max",
    ),
    "is_silent_failure": _info(
        "clip_fraction > 0 and (dlogp_mean ≤ healthy_dlogp_mean or prob_diff_mean ≤ healthy_prob_diff_mean)",
        "bool",
        "a mean looks healthy while gradient is lost in the tail",
        "NaN, which is truthy, when nothing was measured: compare with `is True`",
    ),
}
"""Every key of ``MetricState.finalize``, in order, with its formula, unit, meaning and trap."""
