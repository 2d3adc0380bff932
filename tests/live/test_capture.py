"""Rollouts and training log-probs are paired token by token, or refused in a sentence; never cut, never padded."""

import math
from typing import Any

import pytest
import torch

from mismatch_hooks.live.capture import CaptureError, StepCapture, add_training, rollout_tensor
from mismatch_hooks.schema.capture import RolloutSequence


def _rollout(logprobs: list[float | None], first: int = 10) -> RolloutSequence:
    return RolloutSequence(
        prompt_token_ids=(1, 2),
        response_token_ids=tuple(range(first, first + len(logprobs))),
        rollout_logprobs=tuple(logprobs),
    )


def _capture() -> StepCapture:
    """Three rollouts of 2, 3 and 1 tokens."""
    rollouts = (_rollout([-1.0, -2.0]), _rollout([-3.0, None, -5.0]), _rollout([-6.0]))
    return StepCapture(step=4, sequences=rollouts, weights_at_rollout=0)


MASK = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 0, 0]], dtype=torch.bool)
LOGPROBS = torch.tensor([[-1.5, -2.5, 9.0], [-3.5, -4.5, -5.5], [-6.5, 9.0, 9.0]])


def test_a_forward_of_all_rollouts_is_attached_in_order() -> None:
    capture = _capture()
    indices, rollout = add_training(capture, LOGPROBS, MASK, None)
    assert (indices, capture.covered) == ([0, 1, 2], [0, 1, 2])
    assert [capture.training_row(index) for index in range(3)] == [(-1.5, -2.5), (-3.5, -4.5, -5.5), (-6.5,)]
    assert [mask.tolist() for mask in capture.masks.values()] == [[True, True], [True, True, True], [True]]
    assert rollout.dtype is torch.float32
    assert rollout[0].tolist() == [-1.0, -2.0, 0.0]
    assert math.isnan(rollout[1, 1])


def test_a_minibatch_is_attached_to_the_rollouts_that_it_names() -> None:
    capture = _capture()
    indices, rollout = add_training(capture, LOGPROBS[[2, 0]], MASK[[2, 0]], [2, 0])
    assert (indices, capture.covered) == ([2, 0], [0, 2])
    assert (capture.training_row(2), capture.training_row(0)) == ((-6.5,), (-1.5, -2.5))
    assert rollout[:, 0].tolist() == [-6.0, -1.0]


def test_what_was_captured_is_a_copy_without_a_graph() -> None:
    capture, logprobs, mask = _capture(), LOGPROBS.clone().requires_grad_(), MASK.clone()
    add_training(capture, logprobs, mask, None)
    with torch.no_grad():
        logprobs.zero_()
        mask.zero_()
    assert capture.training_row(0) == (-1.5, -2.5)
    assert capture.masks[0].tolist() == [True, True]
    assert capture.training[0].requires_grad is False


def test_a_mask_of_zeros_and_ones_is_a_mask() -> None:
    capture = _capture()
    add_training(capture, LOGPROBS, MASK.long(), None)
    assert capture.masks[1].tolist() == [True, True, True]


@pytest.mark.parametrize(
    ("logprobs", "mask", "indices", "sentence"),
    [
        pytest.param(
            LOGPROBS[0],
            MASK[0],
            None,
            "training_logprobs is [3] and response_mask [3]; both are [batch, response].",
            id="one dimension",
        ),
        pytest.param(
            LOGPROBS,
            MASK[:, :2],
            None,
            "training_logprobs is [3, 3] and response_mask [3, 2]; both are [batch, response].",
            id="a mask of another shape",
        ),
        pytest.param(
            LOGPROBS[:2],
            MASK[:2],
            None,
            "training_logprobs has 2 rows for 3 sequences; pass sequences=[…] when the forward saw only some of the "
            "rollouts.",
            id="fewer rows",
        ),
        pytest.param(
            LOGPROBS,
            MASK,
            [0, 1],
            "training_logprobs has 3 rows for 2 sequences; pass sequences=[…] when the forward saw only some of the "
            "rollouts.",
            id="more rows",
        ),
        pytest.param(
            LOGPROBS, MASK, [0, 1, 3], "sequences: got [0, 1, 3]; accepts distinct indices from 0 to 2.", id="beyond"
        ),
        pytest.param(
            LOGPROBS,
            MASK,
            [0, 1, -1],
            "sequences: got [0, 1, -1]; accepts distinct indices from 0 to 2.",
            id="negative",
        ),
        pytest.param(
            LOGPROBS, MASK, [0, 1, 1], "sequences: got [0, 1, 1]; accepts distinct indices from 0 to 2.", id="one twice"
        ),
        pytest.param(
            LOGPROBS[:, :2],
            MASK[:, :2],
            None,
            "sequence 1: 2 training_logprobs for 3 response tokens; one belongs to each.",
            id="c14 too short for a sequence",
        ),
        pytest.param(
            LOGPROBS,
            torch.ones(3, 3, dtype=torch.bool),
            None,
            "sequence 0: response_mask marks position 2 active and the response has 2 tokens; mask padding out.",
            id="padding that counts",
        ),
    ],
)
def test_what_does_not_belong_together_is_refused(logprobs: Any, mask: Any, indices: Any, sentence: str) -> None:
    capture = _capture()
    with pytest.raises(CaptureError) as refused:
        add_training(capture, logprobs, mask, indices)
    assert str(refused.value) == sentence
    assert capture.covered == []


def test_padding_of_the_rollout_is_zero_and_a_missing_value_is_nan() -> None:
    padded = rollout_tensor([_rollout([-1.0, None]), _rollout([])], 3)
    assert padded.shape == (2, 3)
    assert padded[0].isnan().tolist() == [False, True, False]
    assert padded[1].tolist() == [0.0, 0.0, 0.0]
    assert rollout_tensor([], 0).shape == (0, 0)


def test_a_sample_is_spread_evenly_over_rollouts_with_active_tokens() -> None:
    rollouts = tuple(_rollout([-float(index)], first=index) for index in range(12))
    capture = StepCapture(step=0, sequences=rollouts, weights_at_rollout=0)
    mask = torch.ones(12, 1, dtype=torch.bool)
    mask[0] = mask[5] = False
    add_training(capture, -torch.ones(12, 1), mask, None)
    chosen, sequences = capture.sample(5)
    assert chosen == [1, 3, 6, 8, 10]
    assert [sequence.response_token_ids for sequence in sequences] == [(index,) for index in chosen]
    assert capture.sample(100)[0] == [1, 2, 3, 4, 6, 7, 8, 9, 10, 11]


def test_a_sample_scores_with_the_mask_that_the_trainer_used() -> None:
    capture = _capture()
    mask = MASK.clone()
    mask[1, 1] = False
    add_training(capture, LOGPROBS, mask, None)
    _, sequences = capture.sample(3)
    assert sequences[1].response_mask == (True, False, True)
    assert (sequences[1].prompt_token_ids, sequences[1].response_token_ids) == ((1, 2), (10, 11, 12))
