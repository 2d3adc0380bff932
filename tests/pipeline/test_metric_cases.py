"""Published incidents as exact values: the ids are those of the project's list of cases."""

import json
import math

import pytest
import torch

from mismatch_hooks.pipeline.metrics import ShapeError, from_lists, measure, merge


def measured(
    training: list[list[float]], rollout: list[list[float]], mask: list[list[int]] | None = None
) -> dict[str, float | int]:
    return measure(*from_lists(training, rollout, mask), epsilon_low=0.2, epsilon_high=0.2).finalize()


def test_c13_the_loss_mask_reads_healthy_and_the_attention_mask_reads_the_placeholders() -> None:
    training, rollout = [[-0.5, -0.7, -3.0, -4.0, -0.6]], [[-0.51, -0.69, 0.0, 0.0, -0.61]]
    loss = measured(training, rollout, [[1, 1, 0, 0, 1]])
    assert (loss["tokens"], loss["clip_fraction"]) == (3, 0.0)
    assert loss["dlogp_mean"] == pytest.approx(0.01, abs=1e-15)
    attention = measured(training, rollout, [[1, 1, 1, 1, 1]])
    assert (attention["tokens"], attention["clip_fraction"]) == (5, 0.4)
    assert attention["dlogp_mean"] == pytest.approx(1.406, abs=1e-15)


def test_c14a_a_log_prob_too_many_is_refused_with_the_sequence_and_both_counts() -> None:
    with pytest.raises(ShapeError) as caught:
        from_lists([[-0.1] * 5, [-0.2] * 8], [[-0.1] * 5, [-0.2] * 9])
    assert str(caught.value) == (
        "sequence 1: 9 rollout_logprobs for 8 training_logprobs; one of each belongs to every token, so pass both "
        "lists uncut and unpadded."
    )


def test_c14c_a_rollout_zero_is_measured_as_it_is_and_leads_the_worst_tokens() -> None:
    metrics = measured([[-0.4, -2.7, -0.3]], [[-0.4, 0.0, -0.3]])
    assert (metrics["dlogp_max"], metrics["clipped"], metrics["nonfinite"]) == (2.7, 1, 0)


def test_c15_a_copy_reads_as_bitwise_equal_and_as_no_difference_of_either_sign() -> None:
    values = [[-0.4, -2.7, -0.3]]
    metrics = measured(values, values)
    assert metrics["bitwise_fraction"] == 1.0
    assert metrics["dlogp_max"] == metrics["k3"] == metrics["chi2_token"] == 0.0
    assert metrics["ess"] == metrics["ratio_mean"] == metrics["ppl_ratio"] == 1.0
    assert math.isnan(metrics["same_sign_fraction"])
    assert metrics["constant_difference"] is False


def test_c21_clip_fraction_is_pooled_over_tokens_for_any_split() -> None:
    outside, inside = (-0.1, -1.1), (-0.1, -0.1)
    rows = [[outside] * 3 + [inside], [outside] * 3 + [inside] * 9]
    training, rollout, mask = from_lists([[t for t, _ in row] for row in rows], [[r for _, r in row] for row in rows])
    whole = measure(training, rollout, mask, epsilon_low=0.2, epsilon_high=0.2).finalize()
    assert whole["clip_fraction"] == 0.375
    rows_apart = [
        measure(training[row], rollout[row], mask[row], epsilon_low=0.2, epsilon_high=0.2)
        for row in (slice(1, 2), slice(0, 1))
    ]
    columns_apart = [
        measure(
            training[:, half],
            rollout[:, half],
            mask[:, half],
            epsilon_low=0.2,
            epsilon_high=0.2,
            sequence_ids=torch.tensor([0, 1]),
        )
        for half in (slice(0, 5), slice(5, None))
    ]
    assert merge(rows_apart).finalize()["clip_fraction"] == 0.375
    assert merge(columns_apart).finalize()["clip_fraction"] == 0.375
    assert merge(columns_apart).finalize()["sequences"] == 2


def test_c22_opposite_signs_cancel_in_the_signed_mean_only() -> None:
    metrics = measured([[-1.0] * 8], [[-1.3, -0.7] * 4])
    assert metrics["dlogp_mean"] == pytest.approx(0.3, abs=1e-15)
    assert metrics["dlogp_signed_mean"] == pytest.approx(0.0, abs=1e-16)
    assert metrics["clip_fraction"] == 1.0
    assert metrics["ratio_mean"] == pytest.approx(math.cosh(0.3), rel=1e-15)
    assert round(metrics["ratio_mean"], 5) == 1.04534
    assert round(metrics["k3"], 5) == 0.04534
    assert metrics["same_sign_fraction"] == 0.5


def test_c23_a_healthy_probability_difference_beside_clipped_tokens_is_a_silent_failure() -> None:
    state = measure(
        *from_lists([[-8.0, -9.0, -0.01, -0.02]], [[-8.5, -8.4, -0.0102, -0.0199]]), epsilon_low=0.2, epsilon_high=0.2
    )
    metrics = state.finalize()
    assert metrics["dlogp_mean"] == pytest.approx(0.275075, abs=1e-15)
    assert metrics["clip_fraction"] == 0.5
    assert metrics["prob_diff_mean"] == pytest.approx(1.32e-4, abs=5e-7)
    assert metrics["is_silent_failure"] is True
    assert state.finalize(healthy_prob_diff_mean=1e-5)["is_silent_failure"] is False
    assert state.finalize(healthy_prob_diff_mean=1e-5, healthy_dlogp_mean=0.3)["is_silent_failure"] is True


def test_c24a_a_ratio_beyond_fp32_is_exact_in_fp64() -> None:
    metrics = measured([[-0.1, -0.1]], [[-0.2, -100.1]])
    assert f"{metrics['ratio_max']:.6e}" == "2.688117e+43"
    assert f"{metrics['k3']:.6e}" == "1.344059e+43"
    assert metrics["nonfinite"] == metrics["ratio_overflow"] == 0


def test_c24b_non_finite_values_are_counted_and_left_out() -> None:
    metrics = measured([[-0.5, math.nan, -math.inf, -0.5]], [[-0.6, -0.5, -0.5, -0.6]])
    assert (metrics["nonfinite"], metrics["tokens"]) == (2, 2)
    assert metrics["dlogp_mean"] == pytest.approx(0.1, abs=1e-16)
    assert metrics["bitwise_fraction"] == 0.0


def test_c24c_an_absurd_value_under_the_mask_leaves_no_trace() -> None:
    metrics = measured([[-0.5, -1e10]], [[-0.5, 0.0]], [[1, 0]])
    assert (metrics["tokens"], metrics["dlogp_mean"], metrics["nonfinite"]) == (1, 0.0, 0)
    assert metrics["bitwise_fraction"] == 1.0


def test_c24d_a_null_in_a_json_line_is_non_finite_and_not_zero() -> None:
    line = json.loads('{"training": [[-0.5, null, -0.5]], "rollout": [[-0.6, -0.5, -0.6]]}')
    metrics = measured(line["training"], line["rollout"])
    assert (metrics["nonfinite"], metrics["tokens"]) == (1, 2)
    assert metrics["dlogp_mean"] == pytest.approx(0.1, abs=1e-16)


def test_c25_clipped_by_range_and_clipped_by_the_sign_of_the_advantage_differ() -> None:
    ratio = torch.tensor([[1.3, 1.3, 0.7, 0.7, 1.0]], dtype=torch.float64)
    rollout = torch.full_like(ratio, -2.0)
    advantages = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    mask = torch.ones_like(ratio, dtype=torch.bool)

    def clipped(weights: torch.Tensor) -> tuple[float, float]:
        state = measure(
            rollout + weights.log(), rollout, mask, epsilon_low=0.2, epsilon_high=0.2, advantages=advantages
        )
        metrics = state.finalize()
        return metrics["clip_fraction"], metrics["clip_fraction_signed"]

    assert clipped(ratio) == (0.8, 0.4)
    assert clipped(ratio.clamp(0.85, 1.15)) == (0.0, 0.0)  # what a reading after truncation would have said
