import random

import pytest

from recipes.grpo_smollm2.reward import EvenTokens, Problem, addition_reward


@pytest.mark.parametrize(
    ("text", "share_unused", "expected"),
    [
        pytest.param("The answer is 19.", 0.75, 0.875, id="right and early"),
        pytest.param("The answer is 19.", 0.0, 0.5, id="right and cut off"),
        pytest.param("The answer is 18.", 0.75, 0.375, id="wrong and early"),
        pytest.param("The answer is 190.", 0.0, 0.0, id="the digits inside another number"),
        pytest.param("", 0.0, 0.0, id="nothing said"),
    ],
)
def test_half_the_reward_is_for_the_number_and_half_for_ending_early(
    text: str, share_unused: float, expected: float
) -> None:
    assert addition_reward(text, answer=19, share_unused=share_unused) == expected


def test_a_model_without_words_is_rewarded_for_even_ids() -> None:
    task = EvenTokens(vocabulary=512)
    assert task.reward(Problem(prompt_ids=(2,), answer=0), [2, 3, 4, 6]) == 0.75
    assert task.reward(Problem(prompt_ids=(2,), answer=0), []) == 0.0


def test_the_same_seed_draws_the_same_prompts_of_differing_lengths() -> None:
    task = EvenTokens(vocabulary=512)
    first, second = random.Random(1), random.Random(1)
    drawn = [task.draw(first) for _ in range(8)]
    assert drawn == [task.draw(second) for _ in range(8)]
    assert len({len(problem.prompt_ids) for problem in drawn}) > 1
    assert all(1 < token < 512 for problem in drawn for token in problem.prompt_ids)
