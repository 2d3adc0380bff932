"""The paired comparison: exact where it says exact, clustered by sequence, and silent towards everybody's streams."""

import math
import pickle
import random
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from mismatch_hooks.pipeline.score import ArmTokens
from mismatch_hooks.pipeline.statistics import LEVEL, POWER, paired_effect
from mismatch_hooks.schema.enums import Arm
from mismatch_hooks.schema.verdict import PairedEffect
from tests.pipeline.samples import EPSILONS, arm_tokens


def _effect(native: np.ndarray, changed: np.ndarray) -> PairedEffect:
    return paired_effect(Arm.BOTH_REFERENCE, arm_tokens(changed), arm_tokens(native), **EPSILONS)


def _by_hand(sums: list[float]) -> float:
    observed = abs(math.fsum(sums))
    flips = [
        abs(math.fsum(sign * value for sign, value in zip(signs, sums, strict=True)))
        for signs in product((1, -1), repeat=len(sums))
    ]
    return sum(flipped >= observed - 1e-12 for flipped in flips) / len(flips)


@pytest.mark.parametrize(
    "sums",
    [
        pytest.param([-0.25, -0.5, -0.125], id="three of one sign"),
        pytest.param([-0.25, 0.5, -0.125, 0.0625], id="mixed"),
        pytest.param([-0.5, 0.5, 0.25], id="ties"),
        pytest.param([-0.5, 0.0, -0.25, 0.0], id="sequences that did not change"),
        pytest.param([-(2.0**-k) for k in range(1, 11)], id="ten of one sign"),
    ],
)
def test_the_sign_flip_p_value_is_that_of_all_sign_assignments(sums: list[float]) -> None:
    # One token a sequence, |dlogp| 1 natively, so that a sequence's sum is the change of its token.
    native = np.ones((len(sums), 1))
    assert _effect(native, native + np.array(sums)[:, None]).p_value == _by_hand(sums)


def test_ten_sequences_can_reach_the_level_and_nine_never_can() -> None:
    for sequences, smallest in ((9, 2 / 2**9), (10, 2 / 2**10)):
        found = _effect(np.full((sequences, 4), 0.1), np.zeros((sequences, 4))).p_value
        assert found == smallest
        assert (found <= LEVEL) is (sequences == 10)


def test_one_sequence_tells_nothing_and_does_not_fail() -> None:
    found = _effect(np.full((1, 500), 0.3), np.zeros((1, 500)))
    assert (found.p_value, found.clip_clustered_p_value, found.interval) == (1.0, 1.0, (-math.inf, math.inf))
    assert (found.resolvable, found.tokens_needed) == (math.inf, None)


def test_beyond_thirteen_sequences_sign_flips_are_sampled_and_repeat() -> None:
    native = np.full((40, 3), 0.1)
    changed = native * np.linspace(0.5, 1.2, 40)[:, None]
    first, second = _effect(native, changed), _effect(native, changed)
    assert first == second
    # Of 2^13 assignments two are as extreme as one sign throughout; of 9,999 drawn ones, none and the observed one.
    assert _effect(native[:13], np.zeros((13, 3))).p_value == 2 / 2**13
    assert _effect(native, np.zeros((40, 3))).p_value == 1 / 10_000


def test_a_sampled_p_value_is_near_that_of_all_sign_assignments() -> None:
    """14 sequences have 16,384 assignments, so 9,999 are drawn.

    At p = 0.03 the binomial standard deviation of what they give is 0.0017; 0.0085 is five of them.
    """
    sums = np.array([-k / 16 if k in (4, 14) else k / 16 for k in range(1, 15)])
    exact = _by_hand(list(sums))
    assert 0.02 < exact < 0.04
    found = _effect(np.full((14, 1), 100.0), 100.0 + sums[:, None]).p_value
    assert found != exact
    assert found == pytest.approx(exact, abs=0.0085)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param([2.0**-k for k in range(1, 11)], id="no ties"),
        pytest.param([0.25] * 10, id="all of one size"),
        pytest.param(
            [0.0, 0.0, 0.0, 0.25, 0.25, 0.5, 0.5, 0.5, 0.5, 0.5], id="ties, and sequences that did not change"
        ),
        pytest.param([0.9] + [2.0**-10] * 9, id="one sequence outweighs all"),
    ],
)
def test_the_level_is_held_exactly_whatever_the_sizes(sizes: list[float]) -> None:
    """Given the sizes of ten sums, all 1,024 signs are as likely where nothing changed; p <= LEVEL in LEVEL of them."""
    accused = 0
    for signs in product((1.0, -1.0), repeat=10):
        sums = np.array(signs) * sizes
        accused += _effect(np.ones((10, 1)), 1.0 + sums[:, None]).p_value <= LEVEL
    assert accused / 2**10 <= LEVEL


@pytest.mark.parametrize(
    ("removed", "added", "expected"),
    [
        pytest.param(10, 0, 2 / 2**10, id="ten removed"),
        pytest.param(0, 10, 2 / 2**10, id="ten added"),
        # 2 (C(12,0) + C(12,1) + C(12,2)) / 2^12 = 158 / 4096
        pytest.param(2, 10, 158 / 4096, id="two against ten"),
        pytest.param(5, 5, 1.0, id="as many either way"),
        pytest.param(0, 0, 1.0, id="none"),
    ],
)
def test_the_clip_test_is_mcnemars_exact_one(removed: int, added: int, expected: float) -> None:
    native = np.concatenate([np.full(removed, 0.5), np.full(added, 0.01), np.full(8, 0.5), np.full(8, 0.01)])
    changed = np.concatenate([np.full(removed, 0.01), np.full(added, 0.5), np.full(8, 0.6), np.full(8, 0.02)])
    found = _effect(native[None].repeat(1, 0), changed[None])
    assert (found.clip_events_removed, found.clip_events_added) == (removed, added)
    assert found.clip_p_value == pytest.approx(expected, rel=1e-12)


def test_clip_events_of_one_sequence_count_once() -> None:
    native, changed = np.full((12, 50), 0.01), np.full((12, 50), 0.01)
    native[3] = 0.5  # fifty clipped tokens, all in one sequence
    found = _effect(native, changed)
    assert (found.clip_events_removed, found.clip_p_value < 1e-12) == (50, True)
    assert found.clip_clustered_p_value == 1.0


def test_the_clip_range_is_that_of_the_ratio() -> None:
    edge_high, edge_low = math.log1p(0.2), math.log1p(-0.2)
    inside = [edge_high, edge_low, 0.0, 0.0]
    outside = [np.nextafter(edge_high, 1.0), np.nextafter(edge_low, -1.0), 0.25, -0.25]
    # The rollout's log-probs are 0 here: any other value would round the difference.
    tokens = [
        ArmTokens(training=np.array(row), rollout=np.zeros(4), sequence=np.arange(4)) for row in (inside, outside)
    ]
    found = paired_effect(Arm.BOTH_REFERENCE, tokens[1], tokens[0], **EPSILONS)
    assert (found.clip_events_removed, found.clip_events_added) == (0, 4)


def test_the_effect_is_the_mean_change_over_tokens_not_over_sequences() -> None:
    short = ArmTokens(training=np.array([0.4, 0.1, 0.1, 0.1]), rollout=np.zeros(4), sequence=np.array([0, 1, 1, 1]))
    zero = ArmTokens(training=np.array([0.0, 0.1, 0.1, 0.1]), rollout=np.zeros(4), sequence=short.sequence)
    found = paired_effect(Arm.BOTH_REFERENCE, zero, short, **EPSILONS)
    assert found.dlogp_change == pytest.approx(-0.1, rel=1e-15)
    assert (found.tokens, found.sequences) == (4, 2)


def test_bits_are_compared_as_bits() -> None:
    row, signed = np.array([-1.0, 0.0, -3.0]), np.array([-1.0, -0.0, np.nextafter(-3.0, 0.0)])
    plain = ArmTokens(training=row, rollout=row, sequence=np.zeros(3, dtype=np.int64))
    other = ArmTokens(training=row, rollout=signed, sequence=plain.sequence)
    assert paired_effect(Arm.BOTH_REFERENCE, other, plain, **EPSILONS).bits_changed == 2
    assert paired_effect(Arm.BOTH_REFERENCE, plain, plain, **EPSILONS).bits_changed == 0


def test_the_interval_is_students_on_the_standard_error_of_a_ratio() -> None:
    """Three sequences of 1, 2 and 3 tokens with changes 0.1, 0.3 and 0.2 a token.

    The mean is 1.3 / 6; the residuals are 0.1 − m, 0.6 − 2 m and 0.6 − 3 m.
    """
    sequence = np.array([0, 1, 1, 2, 2, 2])
    changes = np.array([0.1, 0.3, 0.3, 0.2, 0.2, 0.2])
    native = ArmTokens(training=np.ones(6), rollout=np.zeros(6), sequence=sequence)
    changed = ArmTokens(training=1.0 + changes, rollout=np.zeros(6), sequence=sequence)
    mean = 1.3 / 6
    error = math.sqrt(3 / 2 * ((0.1 - mean) ** 2 + (0.6 - 2 * mean) ** 2 + (0.6 - 3 * mean) ** 2)) / 6
    half = float(stats.t.ppf(1 - LEVEL / 2, df=2)) * error
    found = paired_effect(Arm.BOTH_REFERENCE, changed, native, **EPSILONS).interval
    assert found == pytest.approx((mean - half, mean + half), rel=1e-12)


def test_the_interval_misses_no_more_often_than_stated_with_few_heavy_tailed_sequences() -> None:
    """Of 1,000 comparisons in which nothing changed but the rounding, at most 10 intervals leave out 0.

    At the stated 0.33 % the chance of 11 or more is 6e-4 (binomial), and the seed is fixed. A percentile bootstrap of
    the same ten sequences leaves out 0 in 2 to 4 % of them.
    """
    stream = np.random.default_rng(11)
    missed = 0
    for _ in range(1_000):
        low, high = _effect(0.03 * stream.standard_t(3, (10, 16)), 0.03 * stream.standard_t(3, (10, 16))).interval
        missed += not low <= 0.0 <= high
    assert missed <= 10


def test_resolvable_is_the_change_that_is_found_with_the_stated_power() -> None:
    """A change of exactly the resolvable size is found in about four of five repeats.

    With C = 16 independent equal clusters of one token, the ratio estimator is the mean, and the t test of the formula
    has, to the error of the formula's own approximation, power 0.8. The sign-flip test stands within a few percent of
    the t test for normal sums. Over 200 repeats the binomial standard deviation is 0.028, so 0.68 to 0.92 is wider than
    four of them.
    """
    stream = np.random.default_rng(5)
    clusters, spread = 16, 0.01
    # Standard error of the mean of 16 sums with standard deviation 0.01, times the two t quantiles at 15 degrees.
    expected = float(stats.t.ppf([1 - LEVEL / 2, POWER], df=clusters - 1).sum()) * spread / math.sqrt(clusters)
    unit = stream.normal(0.0, 1.0, clusters)
    unit = (unit - unit.mean()) / unit.std(ddof=1)  # a sample with exactly this spread
    native = np.ones((clusters, 1))
    assert _effect(native, native + spread * unit[:, None]).resolvable == pytest.approx(expected, rel=1e-9)
    found = 0
    for _ in range(200):
        sums = stream.normal(-expected, spread, clusters)
        signs = np.where(stream.random((4096, clusters)) < 0.5, -1.0, 1.0)
        found += float((np.abs(signs @ sums) >= abs(sums.sum()) - 1e-12).mean()) <= LEVEL
    assert 0.68 <= found / 200 <= 0.92


def test_tokens_needed_scales_with_the_square_of_what_is_missing() -> None:
    stream = np.random.default_rng(7)
    native = np.abs(stream.normal(0.0, 0.05, (16, 30)))
    found = _effect(native, np.abs(native + stream.normal(0.0, 0.05, native.shape)))
    wanted = 0.1 * float(native.mean())
    assert found.tokens_needed == math.ceil(480 * (found.resolvable / wanted) ** 2)


def test_nothing_needs_resolving_where_nothing_differs() -> None:
    found = _effect(np.zeros((12, 4)), np.zeros((12, 4)))
    assert (found.p_value, found.dlogp_change, found.tokens_needed, found.bits_changed) == (1.0, 0.0, None, 0)


def test_the_runs_random_streams_are_never_touched() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    before = _streams()
    native = np.full((20, 5), 0.1)
    _effect(native, native * np.linspace(0.1, 1.1, 20)[:, None])
    assert _streams() == before


def _streams() -> tuple[object, ...]:
    return random.getstate(), pickle.dumps(np.random.get_state()), torch.get_rng_state().tolist()
