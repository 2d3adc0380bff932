"""Each trap trips its guard with the value, the side and the remedy, and its healthy twin trips none."""

import math
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from mismatch_hooks.live.registry import load_registry
from mismatch_hooks.pipeline.guards import GUARDS, NOTES, PITFALLS, GuardInput, notes, tripped
from mismatch_hooks.schema.enums import NoiseFloor, Source
from mismatch_hooks.schema.pitfall import GuardPlace
from mismatch_hooks.schema.readback import Readback, Reading, Unobservable
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
        "prefix_cache_outlived_weights",
        "placeholder_logprobs",
        "positions_shifted",
        "retokenised",
        "masks_differ",
        "stored_below_fp32",
        "nonfinite_logprobs",
        "one_sided_temperature",
        "truncated_support",
        "unasked_sampling",
        "dropout_active",
        "padded_vocabulary",
        "packed_without_reset",
        "routing_replay_without_effect",
        "collective_unpinned",
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
        pytest.param(0.7, "raw_logprobs", 0.7, 1.0, id="C08a raw rollout at 0.7, training divides"),
        pytest.param(0.7, "processed_logprobs", None, 0.7, id="C08b processed rollout, training does not divide"),
        pytest.param(1.0, "raw_logprobs", 0.7, 1.0, id="C08c training hard-wired to 0.7"),
        pytest.param(0.7, "processed_logprobs", 0.5, 0.7, id="one of each side's own"),
    ],
)
def test_a_temperature_on_one_side_is_blocked(temperature: float, mode: str, training: Any, applied: float) -> None:
    whose = "each side applies its own" if applied != 1.0 and training else None
    whose = whose or f"{'training' if applied == 1.0 else 'rollout'} alone applies a"
    assert tripped(_at(temperature, mode, training)) == (
        f"Rollout sampled at temperature {temperature} and returned {mode}, those of temperature {applied}; training "
        f"divides logits by {1.0 if training is None else training}: two distributions, because {whose} temperature; "
        "use one temperature in both log-probs.",
    )


@pytest.mark.parametrize(
    ("temperature", "mode", "training"),
    [
        pytest.param(0.7, "processed_logprobs", 0.7, id="c08 control, both at 0.7"),
        pytest.param(1.0, "processed_logprobs", 1.0, id="both at 1"),
        pytest.param(0.0, "processed_logprobs", None, id="greedy sampling divides by nothing"),
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


@pytest.mark.parametrize("value", [-1.0, -100.0, -0.25, -1e4])
@pytest.mark.parametrize("side", ["rollout", "training"])
def test_c13_placeholders_of_another_value_are_blocked_too(value: float, side: str) -> None:
    filled = [*C13_ROLLOUT[:2], value, value, C13_ROLLOUT[4]]
    rows = (filled, C13_TRAINING) if side == "rollout" else (C13_TRAINING, filled)
    sentences = tripped(guard_input([sequence(rows[0])], [rows[1]]))
    assert (
        f"2 active tokens carry placeholder log-probs (one value, {value:.4f}) on {side}, first tokens 2–3 of sequence "
        "0, where the other side has -3.0000; mask tokens out that were not sampled."
    ) in sentences


def test_c13_control_one_value_that_both_sides_have_or_that_is_nearly_0_is_no_placeholder() -> None:
    confident, broken = [-1.1920929e-07] * 4, [-0.8, -0.9, -1.1, -1.2]
    assert not any("one value" in said for said in tripped(guard_input([sequence(confident)], [broken])))
    repeated = [-2.5, -2.5, -2.5, -2.5]
    assert not any(
        "one value" in said for said in tripped(guard_input([sequence(repeated)], [[-2.4, -2.6, -2.45, -2.55]]))
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


@pytest.mark.parametrize(
    ("training", "rescored", "blocked"),
    [
        pytest.param([-0.5, -1.5, -0.25, -2.0], [-0.5, -1.5, -0.25, -2.0], False, id="the trainer gives the same"),
        pytest.param([-0.5, -1.5, -0.25, -2.0], [-0.51, -1.49, -0.26, -2.1], True, id="a copy"),
        pytest.param([-0.5, -1.5, -0.25, -2.01], [-0.51, -1.49, -0.26, -2.1], True, id="a copy but for one token"),
        pytest.param([-0.51, -1.49, -0.25, -2.01], [-0.51, -1.49, -0.25, -2.01], False, id="one token is equal"),
        pytest.param([-0.5, -1.5, -0.26, -2.1], [-0.5, -1.5, -0.26, -2.1], False, id="half are, by the trainer too"),
    ],
)
def test_c15_a_copy_is_told_from_equal_forwards_by_what_the_trainer_gives_again(
    training: list[float], rescored: list[float], blocked: bool
) -> None:
    found = guard_input([sequence([-0.5, -1.5, -0.25, -2.0])], [training], training_rescored=[rescored])
    assert any("are a copy of the rollout's" in sentence for sentence in tripped(found)) is blocked


def test_c15_a_copy_that_went_through_fp32_is_one() -> None:
    values = [-0.1, -1.3, -0.7]
    stored = [struct.unpack(">f", struct.pack(">f", value))[0] for value in values]
    (sentence,) = tripped(guard_input([sequence(values)], [stored], training_rescored=[[-0.2, -1.2, -0.6]]))
    assert "3 of 3 tokens equal, where the trainer's own forward gives 0" in sentence


def test_a_lone_survivor_of_truncated_sampling_has_a_log_prob_of_zero() -> None:
    alone = sequence([-0.5, 0.0], top_k=1, logprobs_mode="processed_logprobs")
    assert [sentence for sentence in tripped(guard_input([alone], [[-0.6, -0.7]])) if "placeholder" in sentence] == []
    raw = sequence([-0.5, 0.0], top_k=1)
    assert [sentence for sentence in tripped(guard_input([raw], [[-0.6, -0.7]])) if "placeholder" in sentence] != []


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


# ---- what one side has and the other does not: C10, C12, C14b, masks, precision -----------------------------------


def test_C10_sampling_settings_that_nobody_asked_for_are_named_with_their_source() -> None:
    file = "generation_config.json"
    given: dict[str, Any] = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    one = sequence([-1.0, -2.0, -0.5], **given, sources=dict.fromkeys((*given, "min_p"), file))
    (sentence,) = tripped(guard_input([one]))
    assert sentence == (
        f"Rollout samples with settings that nobody requested: repetition_penalty=1.1 ({file}), temperature=0.6 "
        f"({file}), top_k=20 ({file}), top_p=0.95 ({file}); pass every sampling parameter explicitly, or build the "
        "engine with generation_config='vllm'."
    )


def test_C10_control_explicit_parameters_are_quiet_beside_the_same_file() -> None:
    explicit: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "repetition_penalty": 1.0}
    one = sequence([-1.0, -2.0, -0.5], **explicit, sources=dict.fromkeys(explicit, "requested"))
    assert (tripped(guard_input([one])), notes(guard_input([one]))) == ((), ())


def test_C09_raw_log_probs_of_truncated_sampling_are_a_note_and_block_nothing() -> None:
    found = guard_input([sequence([-1.0, -2.0, -0.5], top_p=0.8)])
    assert tripped(found) == ()
    (note,) = notes(found)
    assert note.startswith("Rollout samples with top_p=0.8 and returns raw log-probs: both sides agree, and neither")


@pytest.mark.parametrize(
    ("outlived", "step", "words"),
    [
        pytest.param(True, None, "was not reset after the weight update to version 7", id="seen"),
        pytest.param(True, 3, "was not reset after the weight update at step 3 to version 7", id="and its step"),
        pytest.param(None, None, "may not have been reset after the weight update, which", id="cannot be seen"),
    ],
)
def test_C12_cached_tokens_of_other_weights_are_counted(outlived: bool | None, step: int | None, words: str) -> None:
    served = replace(sequence([-1.0, -2.0, -0.5]), cached_tokens=256, cache_outlived_weights=outlived)
    (sentence,) = tripped(replace(guard_input([served]), rollout_updated_at=step))
    assert words in sentence and "256 cached tokens served to 1 sequences; call reset_prefix_cache" in sentence


@pytest.mark.parametrize("cached", [None, 0])
def test_C12_control_without_cached_tokens_an_old_cache_is_nobodys_business(cached: int | None) -> None:
    served = replace(sequence([-1.0, -2.0, -0.5]), cached_tokens=cached, cache_outlived_weights=True)
    assert tripped(guard_input([served])) == ()


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        pytest.param((0, 1, 9), "first at index 2 of sequence 1 (id 9 for 2; 1 in all)", id="C14b another id"),
        pytest.param((0, 1), "Training scored 2 tokens of sequence 1 and rollout sampled 3", id="C14b another length"),
    ],
)
def test_tokens_that_were_tokenised_again_are_named_by_sequence_and_index(seen: tuple[int, ...], words: str) -> None:
    values = [-1.0, -2.0, -0.5]
    found = guard_input([sequence(values)] * 2, [[-1.01, -1.98, -0.52]] * 2, training_token_ids=[(0, 1, 2), seen])
    (sentence,) = tripped(found)
    assert words in sentence


def test_C14b_control_the_sampled_ids_are_quiet() -> None:
    assert tripped(guard_input(training_token_ids=[(0, 1, 2)])) == ()


def test_a_stop_token_that_one_side_counts_is_named() -> None:
    one = replace(sequence([-1.0, -2.0, -0.5], mask=[True, True, False]), finish_reason="stop")
    (sentence,) = tripped(guard_input([one], rollout_masks=[(True, True, True)]))
    assert sentence.startswith("Only rollout counts the stop token of sequence 0 (1 tokens of it differ)")


@pytest.mark.parametrize("given", [None, (True, True, False)])
def test_masks_that_agree_or_were_never_given_are_quiet(given: tuple[bool, ...] | None) -> None:
    one = sequence([-1.0, -2.0, -0.5], mask=[True, True, False])
    assert tripped(guard_input([one], rollout_masks=[given])) == ()


def test_log_probs_that_were_stored_in_bf16_are_named_with_their_spacing() -> None:
    exact = np.linspace(-5.0, -0.1, 24)
    rounded = (exact.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)
    stored = guard_input([sequence(exact.tolist())], [[float(value) for value in rounded]])
    (sentence,) = tripped(stored)
    assert sentence.startswith("All 24 training log-probs are bf16 values, 0.0312 apart near the largest; keep them")
    assert tripped(guard_input([sequence(exact.tolist())], [(exact + 0.01).tolist()])) == ()


def test_a_sum_over_ranks_without_pins_is_named_where_bits_are_expected() -> None:
    ranks = {"parallel.tensor": 2, "parallel.tensor.backend": "nccl"}
    loose = guard_input(bits_expected=True, rollout=readback(ROLLOUT, {"model.vocab.size": 512, **ranks}))
    (sentence,) = tripped(loose)
    assert sentence.startswith("rollout adds up over 2 ranks with NCCL and NCCL_ALGO and NCCL_PROTO unset")
    pins = {f"environment.NCCL_{name}": "Ring" for name in ("ALGO", "PROTO")}
    pinned = readback(ROLLOUT, {"model.vocab.size": 512, **ranks, **pins})
    assert tripped(guard_input(bits_expected=True, rollout=pinned)) == ()
    assert tripped(replace(loose, bits_expected=False)) == ()


def test_a_routing_replay_that_did_not_take_effect_is_named() -> None:
    reading = Reading(effective=False, source=Source.LIVE_MODULE, requested=True, requested_by="config")
    asked = Readback(role=TRAINING, settings={**guard_input().training.settings, "training.routing_replay": reading})
    (sentence,) = tripped(guard_input(training=asked))
    assert sentence.startswith("Routing replay is asked for on training and not in effect")
    assert tripped(guard_input(training=replace_setting(asked, "training.routing_replay", effective=True))) == ()


def test_a_setting_that_is_not_in_effect_is_a_note_because_the_verdicts_are_about_it() -> None:
    reading = Reading(effective=10000.0, source=Source.LIVE_MODULE, requested=100000.0, requested_by="model file")
    healthy = guard_input()
    theta = Readback(role=ROLLOUT, settings={**healthy.rollout.settings, "model.rope.theta": reading})
    found = guard_input(rollout=theta)
    assert tripped(found) == ()
    assert notes(found) == ("model.rope.theta on rollout: requested 100000.0 (model file), in effect 10000.0.",)


def replace_setting(readback: Readback, key: str, **changes: Any) -> Readback:
    reading = readback.settings[key]
    assert isinstance(reading, Reading)
    return Readback(role=readback.role, settings={**readback.settings, key: replace(reading, **changes)})


# ---- the table ----------------------------------------------------------------------------------------------------


def test_every_pitfall_says_how_it_misleads_and_stands_under_a_guard() -> None:
    here = {GuardPlace.PITFALLS_CLEAR: GUARDS, GuardPlace.NOTE: NOTES}
    for id, pitfall in PITFALLS.items():
        assert pitfall.id == id
        if pitfall.guard in here:
            assert id in here[pitfall.guard]
    assert set(GUARDS) | set(NOTES) <= set(PITFALLS)


def test_a_guard_runs_at_its_lowest_floor_and_above(monkeypatch: pytest.MonkeyPatch) -> None:
    higher = replace(PITFALLS["captured_after_update"], lowest_floor=NoiseFloor.PRODUCTION)
    monkeypatch.setitem(PITFALLS, "captured_after_update", higher)
    found = guard_input(weights_written=1)
    assert tripped(found, NoiseFloor.SHARDED_SINGLE_NODE) == ()
    assert len(tripped(found, NoiseFloor.PRODUCTION)) == 1


def test_every_pitfall_that_a_factor_names_exists() -> None:
    named = {pitfall for factor in load_registry().factors.values() for pitfall in factor.pitfalls}
    assert named <= set(PITFALLS)


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
