"""Change detection on counts of clipped tokens: an anchored baseline, a likelihood ratio, and where a rise began.

Counts are nearly binomial, but tokens of one sequence clip together, and a run's rate wanders from step to step by a
share of itself. So a step's variance is taken as n·p·(1 − p) · (clumping + n·p/(1 − p)·wander²), and every evidence, a
log-likelihood ratio in nats, is divided by that bracket. The constants were chosen on the operating curve of
benchmarks/alert_quality.py.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

WANDER_EXPECTED = 0.2  # relative, a step; what is assumed until the run's own steps say otherwise
WANDER_RANGE = (0.1, 0.5)  # above: a run so unsteady would never be judged; below: no run measured is that steady
_CLUMPING = 1.25  # variance over binomial variance where wandering plays no part
_BASELINE_DEVIATIONS = (
    1.5  # of its own counting noise by which a baseline is raised: too low a one never stops alarming
)
_PRIOR_STEPS = 10.0  # weight of WANDER_EXPECTED, in fully informative steps
_OUTLIER = 8.0  # a log-likelihood ratio that one step of a healthy baseline does not reach
_FEWEST_FOR_LINE = 5
_HIGHEST_FRACTION = 0.99  # a rate of 1 has no odds
_FEWEST_RISING_STEPS = 5  # fewer points lie on a line too easily to be called a rise
_RISE_FITS_BETTER = 0.8  # residual of the best line over that of the best jump, from which on it is a rise


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """One step's counts.

    Attributes:
        step: the loop's step.
        tokens: tokens compared, 1 or more.
        clipped: those whose ratio left the clip range.
    """

    step: int
    tokens: int
    clipped: int

    @property
    def fraction(self) -> float:
        """The step's clip_fraction."""
        return self.clipped / self.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What the run's own first steps showed; it never moves with the series.

    Attributes:
        fraction: what is judged against: ``observed`` and its own error, no less than the smallest rate whose rise
            matters.
        observed: pooled over tokens, as it was.
        wander: relative standard deviation of the rate from step to step, beyond counting noise.
        first_step: first step in it.
        last_step: last step in it.
    """

    fraction: float
    observed: float
    wander: float
    first_step: int
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Onset:
    """Where a rise began, and its shape.

    Attributes:
        step: first raised step.
        rise_per_step: slope of clip_fraction since then, or None where a jump fits as well.
    """

    step: int
    rise_per_step: float | None


def pooled(readings: Sequence[Reading]) -> float:
    """Return the clip_fraction of all tokens together; a mean of fractions would weigh short steps too much."""
    return sum(reading.clipped for reading in readings) / sum(reading.tokens for reading in readings)


def judgeable(fraction: float, *, smallest: float) -> float:
    """Return ``fraction``, kept at ``smallest`` or above and below 1, so that multiples of its odds mean something."""
    return min(max(fraction, smallest), _HIGHEST_FRACTION)


def estimate_baseline(readings: Sequence[Reading], *, smallest: float, correlated_steps: int) -> Baseline:
    """Pool the readings, without single spikes among them, into a baseline.

    Args:
        readings: one or more, in order of step.
        smallest: positive; a rate below it is treated as it, because a multiple of nearly nothing is no regression.
        correlated_steps: how many steps in a row wander together; 0 leaves wandering out of the baseline's own error.
    """
    kept = list(readings)
    while len(kept) > 1:
        highest = max(kept, key=lambda reading: reading.fraction)
        others = [reading for reading in kept if reading is not highest]
        fraction = judgeable(pooled(others), smallest=smallest)
        if log_likelihood_ratio(highest, fraction=fraction, wander=WANDER_EXPECTED, odds_ratio=2.0) < _OUTLIER:
            break
        kept = others
    observed = pooled(kept)
    wander = _wander(kept, observed)
    fraction = max(observed, smallest)
    clipped = max(1.0, fraction * sum(reading.tokens for reading in kept))
    error = math.sqrt(1.0 / clipped + wander**2 * correlated_steps / len(kept))
    return Baseline(
        fraction=judgeable(fraction * (1.0 + _BASELINE_DEVIATIONS * error), smallest=smallest),
        observed=observed,
        wander=wander,
        first_step=readings[0].step,
        last_step=readings[-1].step,
    )


def log_likelihood_ratio(reading: Reading, *, fraction: float, wander: float, odds_ratio: float) -> float:
    """Return how much likelier the count is when the odds of clipping are ``odds_ratio`` times those of ``fraction``.

    Positive from a fraction of about ``(odds_ratio − 1) / ln(odds_ratio)`` times ``fraction`` on.

    Args:
        reading: the step's counts.
        fraction: above 0, below 1.
        wander: relative standard deviation of the rate from step to step.
        odds_ratio: above 1. Odds, not rates: twice a rate of 0.6 does not exist.
    """
    plain = reading.clipped * math.log(odds_ratio) - reading.tokens * math.log1p((odds_ratio - 1.0) * fraction)
    return plain / (_CLUMPING + reading.tokens * fraction / (1.0 - fraction) * wander**2)


def is_above(tokens: int, clipped: int, limit: float, *, deviations: float) -> bool:
    """True when the counts exceed ``limit`` by that many standard deviations of counting noise."""
    return clipped - tokens * limit > deviations * math.sqrt(tokens * limit * (1.0 - limit))


def find_onset(readings: Sequence[Reading]) -> Onset:
    """Fit every "level, then higher level" and every "level, then straight rise"; return where the best one bends.

    Least squares weighted by tokens, in one pass over the readings.

    Args:
        readings: two or more, in order of step, with the raised steps at the end.
    """
    origin = readings[0].step
    weights = [float(reading.tokens) for reading in readings]
    times = [float(reading.step - origin) for reading in readings]
    fractions = [reading.fraction for reading in readings]
    total_w = sum(weights)
    total_wy = sum(w * y for w, y in zip(weights, fractions, strict=True))
    total_wyy = sum(w * y * y for w, y in zip(weights, fractions, strict=True))

    jump, rise = (math.inf, len(readings) - 1), (math.inf, 0, 0.0)
    after_w = after_wt = after_wtt = after_wy = after_wty = 0.0
    for index in range(len(readings) - 1, -1, -1):
        weight, time, fraction = weights[index], times[index], fractions[index]
        after_w += weight
        after_wt += weight * time
        after_wtt += weight * time * time
        after_wy += weight * fraction
        after_wty += weight * time * fraction
        before_w, before_wy = total_w - after_w, total_wy - after_wy
        if index > 0 and after_wy / after_w > before_wy / before_w:
            residual = total_wyy - before_wy**2 / before_w - after_wy**2 / after_w
            jump = min(jump, (residual, index))
        if len(readings) - index > _FEWEST_RISING_STEPS:
            bend = (after_wt - time * after_w, after_wtt - 2 * time * after_wt + time * time * after_w)
            along = after_wty - time * after_wy
            slope = (total_w * along - bend[0] * total_wy) / (total_w * bend[1] - bend[0] ** 2)
            level = (total_wy - slope * bend[0]) / total_w
            if slope > 0.0:
                rise = min(rise, (total_wyy - level * total_wy - slope * along, index, slope))
    if rise[0] < _RISE_FITS_BETTER * jump[0]:
        return Onset(step=readings[rise[1]].step, rise_per_step=rise[2])
    return Onset(step=readings[jump[1]].step, rise_per_step=None)


def _wander(readings: Sequence[Reading], fraction: float) -> float:
    # Each step's excess over counting noise estimates wander²; it counts by how well it does so, 1 for endless tokens.
    # Around a line, not around the mean: a drift that has begun must not pass for unrest.
    if fraction == 0.0 or len(readings) < _FEWEST_FOR_LINE:
        return WANDER_EXPECTED
    line = _line(readings)
    freedom = len(readings) / (len(readings) - 2)
    expected = WANDER_EXPECTED**2
    total, weight = _PRIOR_STEPS * expected, _PRIOR_STEPS
    for reading, fitted in zip(readings, line, strict=True):
        counting = fraction * (1.0 - fraction) / reading.tokens
        informative = (expected / (counting / fraction**2 + expected)) ** 2
        total += informative * (freedom * (reading.fraction - fitted) ** 2 - counting) / fraction**2
        weight += informative
    lowest, highest = WANDER_RANGE
    return min(max(math.sqrt(max(total / weight, 0.0)), lowest), highest)


def _line(readings: Sequence[Reading]) -> list[float]:
    middle = sum(reading.step for reading in readings) / len(readings)
    mean = sum(reading.fraction for reading in readings) / len(readings)
    slope = sum((reading.step - middle) * reading.fraction for reading in readings) / sum(
        (reading.step - middle) ** 2 for reading in readings
    )
    return [mean + slope * (reading.step - middle) for reading in readings]


def significant(figure: float) -> str:
    """Return a positive figure below 1 with two significant digits and no exponent: ``0.0009``, ``0.012``."""
    digits = 1 - math.floor(math.log10(figure))
    return f"{figure:.{max(digits, 1)}f}".rstrip("0")
