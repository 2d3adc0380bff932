import math

import pytest
import torch
from torch import Tensor

from recipes.grpo_smollm2.grpo import Batch, group_advantages, kl_to_initial, make_batch, policy_loss


def batch(advantages: list[float], lengths: list[int]) -> Batch:
    return make_batch([[5]] * len(lengths), [[7] * length for length in lengths], torch.tensor(advantages))


def loss(ratios: Tensor, of: Batch) -> float:
    zeros = torch.zeros_like(ratios)
    return policy_loss(ratios.log(), zeros, of, epsilon_low=0.2, epsilon_high=0.3).item()


def test_advantages_are_centred_and_scaled_within_each_group() -> None:
    advantages = group_advantages(torch.tensor([[0.0, 1.0], [10.0, 14.0]]))
    half, two = 0.5 / (math.sqrt(0.5) + 1e-4), 2 / (math.sqrt(8) + 1e-4)
    assert advantages.tolist() == pytest.approx([-half, half, -two, two], rel=1e-6)


def test_a_group_of_equal_rewards_gets_no_advantage() -> None:
    assert group_advantages(torch.tensor([[0.3, 0.3, 0.3]])).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        pytest.param(1.5, 1.0, -1.3, id="too likely already, and good: capped above"),
        pytest.param(1.5, -1.0, 1.5, id="too likely, and bad: not capped"),
        pytest.param(0.5, 1.0, -0.5, id="too unlikely, and good: not capped"),
        pytest.param(0.5, -1.0, 0.8, id="too unlikely already, and bad: capped below"),
        pytest.param(1.1, 1.0, -1.1, id="inside"),
    ],
)
def test_the_ratio_is_clipped_on_the_side_that_would_gain(ratio: float, advantage: float, expected: float) -> None:
    assert loss(torch.tensor([[ratio]]), batch([advantage], [1])) == pytest.approx(expected, rel=1e-6)


def test_every_token_weighs_the_same_whatever_its_sequence() -> None:
    # A mean over sequences would be 0.
    assert loss(torch.ones(2, 3), batch([1.0, -1.0], [1, 3])) == pytest.approx((-1 + 3) / 4)


def test_padding_takes_no_part() -> None:
    of = batch([1.0, 1.0], [1, 2])
    ratios = torch.tensor([[1.0, 9.0], [1.0, 1.0]])
    assert loss(ratios, of) == -1.0
    assert kl_to_initial(ratios.log(), torch.zeros(2, 2), of.response_mask).item() == 0.0


def test_the_distance_to_the_initial_policy_is_k3() -> None:
    mask = torch.tensor([[True, True]])
    distance = kl_to_initial(torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -2.0]]), mask)
    assert distance.item() == pytest.approx((math.exp(-0.5) - 1 + 0.5) / 2, rel=1e-6)


def test_sequences_are_padded_on_the_right() -> None:
    made = make_batch([[1, 2], [3]], [[4], [5, 6, 7]], torch.tensor([1.0, -1.0]))
    assert made.input_ids.tolist() == [[1, 2, 4, 0], [3, 5, 6, 7]]
    assert made.response_ids.tolist() == [[4, 0, 0], [5, 6, 7]]
    assert made.response_mask.tolist() == [[True, False, False], [True, True, True]]
    assert made.prompt_lengths.tolist() == [2, 1]


def test_minibatches_keep_the_order_and_lose_nothing() -> None:
    made = make_batch([[1], [2], [3], [4]], [[5], [6], [7], [8]], torch.arange(4.0))
    parts = list(made.minibatches(2))
    assert [part.input_ids[:, 0].tolist() for part in parts] == [[1, 2], [3, 4]]
    assert [part.advantages.tolist() for part in parts] == [[0.0, 1.0], [2.0, 3.0]]
