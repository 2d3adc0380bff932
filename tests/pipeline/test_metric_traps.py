"""How published mismatch metrics mislead, one test a trap, and agreement with their formulas where they do not."""

import math

import pytest
import torch
from torch import Tensor

from mismatch_hooks.pipeline.metric_table import METRICS
from mismatch_hooks.pipeline.metrics import DtypeError, MetricState, from_lists, measure, merge

COUNTS = {"tokens", "sequences", "nonfinite", "clipped", "ratio_overflow"}


def state_of(
    training: list[list[float]], rollout: list[list[float]], mask: list[list[int]] | None = None
) -> MetricState:
    return measure(*from_lists(training, rollout, mask), epsilon_low=0.2, epsilon_high=0.2)


def sample(batch: int = 7, response: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    rollout = -3.0 * torch.rand(batch, response, generator=generator)
    training = rollout + 0.2 * torch.randn(batch, response, generator=generator)
    lengths = torch.randint(1, response, (batch, 1), generator=generator)
    return training, rollout, torch.arange(response) < lengths


@pytest.mark.parametrize("dlogp", [12.0, 89.0, 709.0], ids=["past fp16", "past fp32", "just inside fp64"])
def test_a_ratio_past_half_or_single_precision_is_exact(dlogp: float) -> None:
    metrics = state_of([[0.0, 0.0]], [[-dlogp, 0.0]]).finalize()
    assert metrics["ratio_max"] == math.exp(dlogp)
    assert metrics["k3"] == pytest.approx((math.expm1(dlogp) - dlogp) / 2, rel=1e-15)
    assert metrics["ratio_overflow"] == 0


def test_a_ratio_past_fp64_is_infinite_and_counted_and_its_dlogp_stays() -> None:
    metrics = state_of([[0.0, -0.5]], [[-1000.0, -0.5]]).finalize()
    assert metrics["ratio_max"] == metrics["ratio_mean"] == metrics["k3"] == metrics["chi2_token"] == math.inf
    assert (metrics["ratio_overflow"], metrics["nonfinite"], metrics["clipped"]) == (1, 0, 1)
    assert (metrics["dlogp_max"], metrics["dlogp_mean"]) == (1000.0, 500.0)
    assert metrics["ess"] == 0.5  # one of two tokens carries all the weight


def test_squares_of_weights_do_not_overflow_the_effective_sample_size() -> None:
    metrics = state_of([[0.0, 0.0, 0.0, 0.0]], [[-400.0, -400.0, 0.0, 0.0]]).finalize()
    assert metrics["chi2_token"] == math.inf  # mean exp(800) / 2 has no fp64 value
    assert metrics["ess"] == 0.5
    assert metrics["ratio_mean"] == pytest.approx(math.exp(400.0) / 2, rel=1e-13)


def test_a_mask_selects_so_that_infinity_under_it_does_not_become_nan() -> None:
    training, rollout = [[-0.5, math.inf, math.nan, -1e308]], [[-0.4, -0.5, -0.5, 1e308]]
    metrics = state_of(training, rollout, [[1, 0, 0, 0]]).finalize()
    alone = state_of([[-0.5]], [[-0.4]]).finalize()
    assert {name: str(value) for name, value in metrics.items()} == {name: str(v) for name, v in alone.items()}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None], ids=["nan", "inf", "-inf", "null"])
def test_a_non_finite_value_is_counted_and_excluded_and_never_becomes_zero_or_one(value: float) -> None:
    for training, rollout in (([[-0.5, value]], [[-0.4, -0.3]]), ([[-0.5, -0.3]], [[-0.4, value]])):
        metrics = state_of(training, rollout).finalize()
        alone = state_of([[-0.5]], [[-0.4]]).finalize()
        changed = {name for name in METRICS if str(metrics[name]) != str(alone[name])}
        assert changed == {"nonfinite"}
        assert metrics["nonfinite"] == 1


def test_a_non_finite_value_equal_on_both_sides_is_not_bitwise_equality() -> None:
    metrics = state_of([[-0.5, -math.inf, math.nan]], [[-0.5, -math.inf, math.nan]]).finalize()
    assert metrics["bitwise_fraction"] == 1 / 3


def test_negative_zero_is_not_bitwise_equal_to_zero() -> None:
    metrics = state_of([[-0.0, 0.0, -0.0]], [[0.0, 0.0, -0.0]]).finalize()
    assert metrics["bitwise_fraction"] == 2 / 3
    assert metrics["dlogp_max"] == 0.0


@pytest.mark.parametrize(
    ("values", "mask", "nonfinite"),
    [
        pytest.param([[-0.5, -0.5]], [[0, 0]], 0, id="all masked"),
        pytest.param([[]], [[]], 0, id="empty responses"),
        pytest.param([], [], 0, id="no sequences"),
        pytest.param([[math.nan, math.nan]], [[1, 1]], 2, id="nothing finite"),
    ],
)
def test_no_counted_token_is_nan_everywhere_and_never_a_zero_that_looks_perfect(
    values: list[list[float]], mask: list[list[int]], nonfinite: int
) -> None:
    metrics = state_of(values, values, mask).finalize(healthy_dlogp_mean=1.0)
    assert metrics["nonfinite"] == nonfinite
    assert all(metrics[name] == 0 for name in COUNTS - {"nonfinite"})
    assert all(math.isnan(metrics[name]) for name in METRICS if name not in COUNTS)


def test_a_placeholder_copy_shows_as_all_equal_and_leaves_sign_statistics_unmeasured() -> None:
    training, _, mask = sample()
    metrics = measure(training, training, mask, epsilon_low=0.2, epsilon_high=0.2).finalize()
    assert metrics["bitwise_fraction"] == 1.0
    assert math.isnan(metrics["same_sign_fraction"])


def test_maxima_are_over_raw_ratios_and_over_tokens_of_all_sequences() -> None:
    metrics = state_of([[0.0], [0.0]], [[-5.0], [-1.0]]).finalize()
    assert metrics["ratio_max"] == math.exp(5.0)  # not 2 or 1.2, and not the mean of exp(5) and exp(1)
    assert metrics["dlogp_max"] == 5.0


def test_ranks_with_uneven_token_counts_merge_to_the_pooled_mean() -> None:
    large = state_of([[-1.0] * 9], [[-1.0] * 9])
    small = state_of([[-1.0]], [[-2.0]])
    metrics = merge([large, small]).finalize()
    assert metrics["dlogp_mean"] == pytest.approx(0.1, abs=1e-16)  # the mean of rank means says 0.5
    assert metrics["clip_fraction"] == 0.1


def test_a_rank_without_tokens_removes_no_metric() -> None:
    empty = measure(torch.zeros(0, 4), torch.zeros(0, 4), torch.zeros(0, 4).bool(), epsilon_low=0.2, epsilon_high=0.2)
    full = measure(
        torch.tensor([[0.0]]),
        torch.tensor([[-1.0]]),
        torch.tensor([[True]]),
        epsilon_low=0.2,
        epsilon_high=0.2,
        advantages=torch.tensor([1.0]),
    )
    assert merge([empty, full]).finalize() == full.finalize()
    assert full.finalize()["clip_fraction_signed"] == 1.0


def test_a_signed_fraction_over_part_of_the_tokens_is_not_reported_as_the_whole() -> None:
    with_advantage = measure(
        *from_lists([[0.0]], [[-1.0]]), epsilon_low=0.2, epsilon_high=0.2, advantages=torch.ones(1)
    )
    without = state_of([[0.0]], [[-1.0]])
    assert math.isnan(merge([with_advantage, without]).finalize()["clip_fraction_signed"])
    assert merge([with_advantage, without]).finalize()["clip_fraction"] == 1.0


def test_a_nan_advantage_is_no_sign() -> None:
    tokens = from_lists([[0.0, 0.0]], [[-1.0, -1.0]], [[1, 0]])
    hidden = measure(*tokens, epsilon_low=0.2, epsilon_high=0.2, advantages=torch.tensor([[1.0, math.nan]]))
    active = measure(*tokens, epsilon_low=0.2, epsilon_high=0.2, advantages=torch.tensor([[math.nan, 1.0]]))
    assert hidden.finalize()["clip_fraction_signed"] == 1.0
    assert math.isnan(active.finalize()["clip_fraction_signed"])


def test_renormalised_rollout_log_probs_show_in_the_mean_ratio_and_in_one_sign_while_nothing_is_clipped() -> None:
    training = torch.tensor([[-0.2, -1.1, -2.3, -0.7]], dtype=torch.float64)
    rollout = training - math.log(0.895)  # top-p kept this mass and divided by it
    metrics = measure(
        training, rollout, torch.ones(1, 4, dtype=torch.bool), epsilon_low=0.2, epsilon_high=0.2
    ).finalize()
    assert metrics["ratio_mean"] == pytest.approx(0.895, rel=1e-15)
    assert (metrics["clip_fraction"], metrics["same_sign_fraction"]) == (0.0, 1.0)


def test_an_offset_without_rounding_is_a_constant_difference_and_one_ulp_ends_it() -> None:
    assert state_of([[-0.5, -1.5]], [[-0.25, -1.25]]).finalize()["constant_difference"] is True
    nudged = math.nextafter(-1.25, 0.0)
    assert state_of([[-0.5, -1.5]], [[-0.25, nudged]]).finalize()["constant_difference"] is False
    assert state_of([[-0.5]], [[-0.25]]).finalize()["constant_difference"] is False  # one token is always constant


def test_the_none_at_position_zero_of_prompt_log_probs_is_non_finite() -> None:
    training, rollout, mask = from_lists([[-0.5, -0.4]], [[None, -0.4]])
    assert rollout[0, 0].isnan()
    metrics = measure(training, rollout, mask, epsilon_low=0.2, epsilon_high=0.2).finalize()
    assert (metrics["nonfinite"], metrics["tokens"]) == (1, 1)


def test_slices_of_one_sequence_on_several_ranks_count_each_token_and_the_sequence_once() -> None:
    training, rollout, mask = sample(batch=3, response=8)
    ids = torch.arange(3)
    slices = [
        measure(training[:, half], rollout[:, half], mask[:, half], epsilon_low=0.2, epsilon_high=0.2, sequence_ids=ids)
        for half in (slice(0, 4), slice(4, 8))
    ]
    whole = measure(training, rollout, mask, epsilon_low=0.2, epsilon_high=0.2).finalize()
    merged = merge(slices).finalize()
    assert (merged["tokens"], merged["sequences"]) == (int(mask.sum()), 3)
    # Sums of at most 8 terms below 1 nat, each order wrong by at most 8 · 2⁻⁵³.
    assert merged["ppl_ratio"] == pytest.approx(whole["ppl_ratio"], rel=16 * 2.0**-53)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("side", ["training_logprobs", "rollout_logprobs"])
def test_log_probs_below_fp32_are_refused_by_name_and_with_the_reason(dtype: torch.dtype, side: str) -> None:
    good = torch.tensor([[-5.0]])
    sides = {"training_logprobs": good, "rollout_logprobs": good} | {side: good.to(dtype)}
    with pytest.raises(DtypeError) as caught:
        measure(**sides, response_mask=torch.tensor([[True]]), epsilon_low=0.2, epsilon_high=0.2)
    assert str(caught.value) == (
        f"{side} is {dtype}; accepts float32 or float64, computed that way and not cast afterwards: a bf16 log-prob "
        "near -5 has a spacing of 0.03, so differences would be quantisation noise."
    )


def test_bf16_near_minus_five_really_has_a_spacing_of_three_hundredths() -> None:
    spacing = (torch.tensor(-5.0, dtype=torch.bfloat16).view(torch.int16) + 1).view(torch.bfloat16).float() + 5.0
    assert abs(float(spacing)) == 0.03125


def test_k3_is_never_below_zero_by_more_than_its_rounding() -> None:
    dlogp = [10.0**exponent for exponent in range(-20, 1)]
    metrics = state_of([[-1.0] * len(dlogp)], [[-1.0 - d for d in dlogp]]).finalize()
    assert metrics["k3"] > 0
    tiny = state_of([[-1e-9, -3e-9]], [[0.0, 0.0]]).finalize()
    assert abs(tiny["k3"] - 2.5e-18) <= 2.0**-52 * tiny["dlogp_mean"]


def test_public_formulas_agree_where_no_clamp_is_reached() -> None:
    """verl's and slime's names, as plain torch in fp64 over the same tokens; rounding is 400 terms · 2⁻⁵³."""
    training, rollout, mask = sample()
    metrics = measure(training, rollout, mask, epsilon_low=0.2, epsilon_high=0.2).finalize()
    dlogp = (training.double() - rollout.double())[mask]
    ratio = dlogp.clamp(-20, 20).exp()
    rows = [(training.double() - rollout.double())[row][mask[row]] for row in range(mask.shape[0])]
    public = {
        "dlogp_mean": dlogp.abs().mean(),  # train_rollout_logprob_abs_diff, per token
        "prob_diff_mean": (training.double().exp() - rollout.double().exp())[mask]
        .abs()
        .mean(),  # rollout_probs_diff_mean
        "k1": -dlogp.mean(),  # kl
        "k3": (ratio - dlogp - 1).mean(),  # k3_kl, mismatch_kl, gen_kl_error
        "chi2_token": (ratio.square()).mean() - 1,
        "ppl_ratio": torch.stack([(-row.mean()).exp() for row in rows]).mean(),
        "ess": 1 / (ratio / ratio.mean()).square().mean(),
        "ratio_mean": ratio.mean(),
    }
    for name, value in public.items():
        assert metrics[name] == pytest.approx(float(value), rel=1e-12, abs=400 * 2.0**-53), name


def test_a_clamped_chi2_or_k3_hides_a_tail_that_ours_shows() -> None:
    metrics = state_of([[0.0, 0.0]], [[-30.0, 0.0]]).finalize()
    assert metrics["k3"] > math.exp(29.0)
    assert metrics["k3"] > (math.exp(20.0) - 1 - 20.0) / 2
