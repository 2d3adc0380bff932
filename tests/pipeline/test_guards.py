"""Each trap trips its guard with the value, the side and the remedy, and its healthy twin trips none."""

import math
from typing import Any

import numpy as np
import pytest

from mismatch_hooks.pipeline.guards import GUARDS, GuardInput, tripped
from mismatch_hooks.schema.readback import Unobservable
from tests.pipeline.samples import ROLLOUT, TRAINING, digest, guard_input, readback, sequence


def test_a_healthy_capture_trips_nothing() -> None:
    assert tripped(guard_input()) == ()


def test_guards_speak_in_the_order_of_their_table() -> None:
    found = guard_input(weights_written=2, rollout_weights=None)
    assert [sentence.split(";")[0] for sentence in tripped(found)] == [
        "The weights of the two sides were not compared",
        "The trainer's weights were written 2 times between sampling and capture",
    ]
    assert list(GUARDS) == [
        "weights_differ",
        "stale_rollout",
        "captured_after_update",
        "placeholder_logprobs",
        "positions_shifted",
        "nonfinite_logprobs",
        "sampling_convention",
        "dropout_active",
        "padded_vocabulary",
    ]


# ---- weights and time ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rollout", "training", "sentence"),
    [
        pytest.param(
            {"a": "1", "b": "2"},
            {"a": "1", "b": "3"},
            "1 of 2 tensors differ between rollout and training (b); kernels cannot be judged on different weights, "
            "so sync every tensor and look at the export.",
            id="one tensor is stale",
        ),
        pytest.param(
            {"a": "1"},
            {"a": "1", "b": "3"},
            "1 of 2 tensors differ between rollout and training (b); kernels cannot be judged on different weights, "
            "so sync every tensor and look at the export.",
            id="missing on rollout",
        ),
        pytest.param(
            {"a": "1", "c": "4"},
            {"a": "1"},
            "1 of 2 tensors differ between rollout and training (c); kernels cannot be judged on different weights, "
            "so sync every tensor and look at the export.",
            id="missing on training",
        ),
        pytest.param(
            {f"t{i}": "0" for i in range(8)},
            {f"t{i}": "1" for i in range(8)},
            "8 of 8 tensors differ between rollout and training (t0, t1, t2, t3, t4, t5, …); kernels cannot be judged "
            "on different weights, so sync every tensor and look at the export.",
            id="the first six are named",
        ),
        pytest.param(
            {"a": "unobservable: sharded"},
            {"a": "unobservable: sharded"},
            "1 of 1 tensors cannot be compared (a: unobservable: sharded).",
            id="unobservable is not equal",
        ),
    ],
)
def test_weights_that_differ_are_named(rollout: dict[str, str], training: dict[str, str], sentence: str) -> None:
    found = guard_input(rollout_weights=digest(ROLLOUT, rollout), training_weights=digest(TRAINING, training))
    assert tripped(found) == (sentence,)


def test_samples_of_another_weight_version_are_staleness() -> None:
    found = guard_input([sequence([-1.0, -2.0, -0.5], weight_version="6")])
    assert tripped(found) == (
        "Samples come from weight version 6 and the trainer is at 7: staleness, not mismatch; score them with the "
        "weights that sampled them.",
    )


def test_a_loop_without_version_labels_is_not_called_stale() -> None:
    assert tripped(guard_input([sequence([-1.0, -2.0, -0.5], weight_version="")])) == ()


def test_a_capture_after_the_first_update_is_refused() -> None:
    assert tripped(guard_input(weights_written=3)) == (
        "The trainer's weights were written 3 times between sampling and capture; what differs is the update, so "
        "capture the forward before the first optimizer step.",
    )


# ---- temperature, C08 ---------------------------------------------------------------------------------------------


def _at(temperature: float, mode: str, training: Any) -> GuardInput:
    settings = {} if training is None else {"training.logprobs.temperature": training}
    return guard_input(
        [sequence([-1.0, -2.0, -0.5], temperature=temperature, logprobs_mode=mode)],
        training=readback(TRAINING, {"model.vocab.logits_width": 512, **settings}),
    )


@pytest.mark.parametrize(
    ("temperature", "mode", "training", "applied"),
    [
        pytest.param(0.7, "raw_logprobs", 0.7, 1.0, id="c08a raw rollout at 0.7, training divides"),
        pytest.param(0.7, "processed_logprobs", None, 0.7, id="c08b processed rollout, training does not divide"),
        pytest.param(1.0, "raw_logprobs", 0.7, 1.0, id="c08c training hard-wired to 0.7"),
    ],
)
def test_a_temperature_on_one_side_is_blocked(temperature: float, mode: str, training: Any, applied: float) -> None:
    assert tripped(_at(temperature, mode, training)) == (
        f"Rollout sampled at temperature {temperature} and returned {mode}, those of temperature {applied}; training "
        f"divides logits by {1.0 if training is None else training}: two distributions, so use one temperature in "
        "both log-probs.",
    )


@pytest.mark.parametrize(
    ("temperature", "mode", "training"),
    [
        pytest.param(0.7, "processed_logprobs", 0.7, id="c08 control, both at 0.7"),
        pytest.param(1.0, "processed_logprobs", 1.0, id="both at 1"),
        pytest.param(0.7, "raw_logprobs", None, id="raw log-probs carry no temperature"),
    ],
)
def test_one_temperature_on_both_sides_is_quiet(temperature: float, mode: str, training: Any) -> None:
    assert tripped(_at(temperature, mode, training)) == ()


def test_a_training_temperature_that_cannot_be_read_is_not_taken_for_one() -> None:
    assert tripped(_at(1.0, "raw_logprobs", Unobservable(reason="the loop's own function"))) == (
        "The temperature of the training log-probs cannot be read (the loop's own function); report it.",
    )


# ---- truncated sampling, C09 --------------------------------------------------------------------------------------


def _truncated(mode: str, shift: float, **sampling: Any) -> tuple[str, ...]:
    training = np.linspace(-3.0, -1.0, 12)
    rollout = sequence(list(training - shift), logprobs_mode=mode, **sampling)
    return tripped(guard_input([rollout], [list(training)]))


@pytest.mark.parametrize(
    ("name", "value", "shift", "seen"),
    [
        pytest.param("top_p", 0.8, -0.2218, "mean dlogp -0.2218, a kept mass of about 0.801", id="c09 top_p"),
        pytest.param("top_k", 20, -0.765, "mean dlogp -0.7650, a kept mass of about 0.465", id="c09 top_k"),
        pytest.param("min_p", 0.1, -0.1, "mean dlogp -0.1000, a kept mass of about 0.905", id="min_p"),
    ],
)
def test_truncated_sampling_is_blocked_from_the_settings_with_the_mass_that_was_kept(
    name: str, value: float, shift: float, seen: str
) -> None:
    assert _truncated("processed_logprobs", shift, **{name: value}) == (
        f"Rollout log-probs are processed with {name}={value}, which training does not apply ({seen}); sample with "
        f"{name} off or return raw log-probs.",
    )


def test_truncated_sampling_is_blocked_however_small_its_effect() -> None:
    assert len(_truncated("processed_logprobs", -1e-6, top_p=0.999)) == 1


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_in_processed_log_probs_is_blocked(name: str) -> None:
    assert _truncated("processed_logprobs", -0.1, **{name: 1.1}) == (
        f"Rollout log-probs are processed with {name}=1.1, which training does not apply; sample with {name} off or "
        "return raw log-probs.",
    )


@pytest.mark.parametrize(
    ("mode", "sampling"),
    [
        pytest.param("processed_logprobs", {"top_p": 1.0, "top_k": 0}, id="c09 control, off"),
        pytest.param("processed_logprobs", {"top_k": -1, "min_p": 0.0}, id="off in its other spelling"),
        pytest.param("raw_logprobs", {"top_p": 0.8, "top_k": 20}, id="raw log-probs are not renormalised"),
    ],
)
def test_sampling_that_leaves_the_log_probs_alone_is_quiet(mode: str, sampling: dict[str, Any]) -> None:
    assert _truncated(mode, -0.01, **sampling) == ()


# ---- positions, C11 -----------------------------------------------------------------------------------------------

C11_ROLLOUT = [-0.1, -2.0, -0.5, -3.0, -0.2, -1.1, -0.7, -2.4]
C11_TRAINING = [-2.0, -0.5, -3.0, -0.2, -1.1, -0.7, -2.4, -1.0]


def test_c11_log_probs_one_position_ahead_are_blocked() -> None:
    assert tripped(guard_input([sequence(C11_ROLLOUT)], [C11_TRAINING])) == (
        "Training is one position ahead of rollout: at lag 1 all 7 overlapping pairs are equal; at lag 0 mean |dlogp| "
        "is 1.6375. Line both up so that each log-prob belongs to the token at its own position.",
    )


def test_c11_the_other_way_round_is_one_position_behind() -> None:
    (sentence,) = tripped(guard_input([sequence(C11_TRAINING)], [C11_ROLLOUT]))
    assert sentence.startswith("Training is one position behind rollout: at lag -1 all 7 overlapping pairs are equal;")


def test_c11_control_a_constant_sequence_is_not_called_shifted() -> None:
    constant = [-0.7] * 20
    assert tripped(guard_input([sequence(constant)], [constant], aligned=True)) == ()
    nearly = [value + 1e-4 * (-1) ** index for index, value in enumerate(constant)]
    assert tripped(guard_input([sequence(constant)], [nearly])) == ()


def test_a_shift_is_seen_through_the_noise_of_real_engines() -> None:
    stream = np.random.default_rng(0)
    tokens = -stream.exponential(1.0, 65)
    training = tokens[1:] + stream.normal(0.0, 0.05, 64)
    (sentence,) = tripped(guard_input([sequence(list(tokens[:-1]))], [list(training)]))
    assert sentence.startswith("Training is one position ahead of rollout: at lag 1 mean |dlogp| of 63 pairs is 0.0")


def test_healthy_noise_and_unrelated_log_probs_are_not_called_shifted() -> None:
    stream = np.random.default_rng(0)
    for _ in range(50):
        tokens, others = -stream.exponential(1.0, 64), -stream.exponential(1.0, 64)
        noisy = tokens + stream.normal(0.0, 0.05, 64)
        assert tripped(guard_input([sequence(list(tokens))], [list(noisy)])) == ()
        assert tripped(guard_input([sequence(list(tokens))], [list(others)])) == ()


def test_tokens_of_different_sequences_and_masked_tokens_are_no_pairs() -> None:
    # Shifted across the border of two sequences only: inside each there is one pair.
    rollout = [sequence([-1.0, -2.0]), sequence([-3.0, -4.0]), sequence([-5.0, -6.0])]
    assert tripped(guard_input(rollout, [[-2.0, -9.0], [-4.0, -9.0], [-6.0, -9.0]])) == ()
    masked = sequence(C11_ROLLOUT, mask=[True, True, True, True, False, True, True, True])
    assert tripped(guard_input([masked], [C11_TRAINING])) != ()
    alternating = sequence(C11_ROLLOUT, mask=[index % 2 == 0 for index in range(8)])
    assert tripped(guard_input([alternating], [C11_TRAINING])) == ()


# ---- values that are none: C13, C14, C15 --------------------------------------------------------------------------

C13_TRAINING, C13_ROLLOUT = [-0.5, -0.7, -3.0, -4.0, -0.6], [-0.51, -0.69, 0.0, 0.0, -0.61]


def test_c13_placeholder_zeros_of_tool_tokens_are_blocked_by_position() -> None:
    assert tripped(guard_input([sequence(C13_ROLLOUT)], [C13_TRAINING])) == (
        "2 active tokens carry placeholder log-probs (exact 0) on rollout, first tokens 2–3 of sequence 0, where the "
        "other side has -3.0000; mask tokens out that were not sampled.",
    )


def test_c13_control_with_the_loss_mask_it_is_quiet() -> None:
    masked = sequence(C13_ROLLOUT, mask=[True, True, False, False, True])
    assert tripped(guard_input([masked], [C13_TRAINING])) == ()


@pytest.mark.parametrize(
    ("rollout", "training", "side", "other"),
    [
        pytest.param([-0.5, 0.0], [-0.51, -2.7], "rollout", "-2.7000", id="c14c zero on rollout"),
        pytest.param([-0.5, -2.7], [-0.51, 0.0], "training", "-2.7000", id="c14c zero on training"),
    ],
)
def test_one_exact_zero_is_blocked_with_sequence_and_index(
    rollout: list[float], training: list[float], side: str, other: str
) -> None:
    healthy = sequence([-1.0, -1.0])
    assert tripped(guard_input([healthy, sequence(rollout)], [[-1.1, -1.1], training])) == (
        f"1 active tokens carry placeholder log-probs (exact 0) on {side}, first token 1 of sequence 1, where the "
        f"other side has {other}; mask tokens out that were not sampled.",
    )


def test_a_confident_token_may_be_exactly_zero_on_one_side() -> None:
    assert tripped(guard_input([sequence([-0.5, 0.0, -1e-7])], [[-0.51, -1.2e-7, 0.0]])) == ()


def test_c15_a_copy_of_the_rollout_is_nothing_compared() -> None:
    values = [-0.5, -1.5, -0.25]
    assert tripped(guard_input([sequence(values)], [list(values)])) == (
        "Training log-probs are a copy of the rollout's (3 of 3 tokens equal with no operator aligned); nothing was "
        "compared. Pass what the trainer computed.",
    )


def test_c15_control_an_aligned_run_may_be_equal_on_every_token() -> None:
    values = [-0.5, -1.5, -0.25]
    assert tripped(guard_input([sequence(values)], [list(values)], aligned=True)) == ()


@pytest.mark.parametrize(
    ("rollout", "training", "sentences"),
    [
        pytest.param(
            [-0.6, -0.5, -0.5, -0.6],
            [-0.5, math.nan, -math.inf, -0.5],
            ("2 of 4 training log-probs are NaN, infinite or missing; find their tokens first.",),
            id="c24b NaN and infinity",
        ),
        pytest.param(
            [-0.6, None, -0.5, -0.6],
            [-0.5, -0.5, -0.4, -0.5],
            ("1 of 4 rollout log-probs are NaN, infinite or missing; find their tokens first.",),
            id="a value that was not delivered",
        ),
    ],
)
def test_log_probs_that_are_no_numbers_are_counted(
    rollout: list[float | None], training: list[float], sentences: tuple[str, ...]
) -> None:
    assert tripped(guard_input([sequence(rollout)], [training])) == sentences


def test_a_masked_nan_is_nobodys_business() -> None:
    masked = sequence([-0.6, None, -0.5], mask=[True, False, True])
    assert tripped(guard_input([masked], [[-0.5, math.nan, -0.4]])) == ()


# ---- the model: dropout, C16 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "attention", "hidden", "sentences"),
    [
        pytest.param("train", 0.1, 0.0, ["attention dropout of 0.1"], id="attention"),
        pytest.param("train", 0.1, 0.2, ["attention dropout of 0.1", "hidden dropout of 0.2"], id="both"),
        pytest.param("train", {"l0": 0.0, "l1": 0.1}, 0.0, ["attention dropout of 0.1"], id="in one layer"),
        pytest.param({"l0": "eval", "l1": "train"}, 0.1, 0.0, ["attention dropout of 0.1"], id="modules in both modes"),
        pytest.param(Unobservable(reason="?"), 0.1, 0.0, ["attention dropout of 0.1"], id="in an unknown mode"),
        pytest.param("eval", 0.1, 0.2, [], id="in eval mode"),
        pytest.param("train", 0.0, 0, [], id="rates of 0"),
    ],
)
def test_dropout_that_is_active_while_scoring_is_blocked(
    mode: Any, attention: Any, hidden: Any, sentences: list[str]
) -> None:
    settings = {
        "training.mode": mode,
        "training.dropout.attention": attention,
        "training.dropout.hidden": hidden,
    }
    found = tripped(guard_input(training=readback(TRAINING, settings)))
    remedy = " is active while training scores; set it to 0 or score in eval mode."
    assert list(found) == [start + remedy for start in sentences]


def test_c16_padded_columns_inside_the_log_sum_exp_are_blocked() -> None:
    training = readback(TRAINING, {"model.vocab.logits_width": 640, "training.mode": "eval"})
    shift = math.log(512 / 640)
    rollout = [-1.0 - index / 10 for index in range(8)]
    found = guard_input([sequence(rollout)], [[value + shift for value in rollout]], training=training)
    assert tripped(found) == (
        "Training normalises over 640 logits and rollout over 512: 128 padded columns are inside the log-sum-exp, and "
        "all differences have one sign; mask them.",
    )


def test_c16_control_padded_and_masked_is_quiet() -> None:
    # The trainer reports the columns that its log-sum-exp really covers, not the rows of its head.
    assert tripped(guard_input(training=readback(TRAINING, {"model.vocab.logits_width": 512}))) == ()
