"""Questions with an answer that can be checked, and what an answer is worth."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from recipes.grpo_smollm2.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One prompt.

    Attributes:
        prompt_ids: token ids, as the engines take them.
        answer: what a right response contains.
    """

    prompt_ids: tuple[int, ...]
    answer: int


class Task(Protocol):
    """Where prompts come from and how responses are judged."""

    stop_token_ids: tuple[int, ...]

    def draw(self, rng: random.Random) -> Problem:
        """The next prompt."""

    def reward(self, problem: Problem, response_ids: Sequence[int]) -> float:
        """What a response is worth, 0 to 1."""


class Addition:
    """Sums in words: half the reward for the right number, half for ending early."""

    def __init__(self, folder: Path, *, max_response_tokens: int) -> None:
        from transformers import AutoTokenizer

        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._max_response_tokens = max_response_tokens
        self.stop_token_ids: tuple[int, ...] = (self._tokenizer.convert_tokens_to_ids("<|im_end|>"),)

    def draw(self, rng: random.Random) -> Problem:
        """A sum of two numbers from 2 to 20."""
        left, right = rng.randint(2, 20), rng.randint(2, 20)
        # The chat template would put a system message before the question, twice as long as the question itself.
        text = f"<|im_start|>user\nWhat is {left} plus {right}?<|im_end|>\n<|im_start|>assistant\n"
        return Problem(prompt_ids=tuple(self._tokenizer.encode(text)), answer=left + right)

    def reward(self, problem: Problem, response_ids: Sequence[int]) -> float:
        """0.5 for naming the sum, and up to 0.5 for ending with the end token, the earlier the more."""
        ended = len(response_ids) > 0 and response_ids[-1] in self.stop_token_ids
        return addition_reward(
            self._tokenizer.decode(response_ids),
            answer=problem.answer,
            share_unused=1 - len(response_ids) / self._max_response_tokens if ended else 0.0,
        )


def addition_reward(text: str, *, answer: int, share_unused: float) -> float:
    """What a decoded response is worth; ``share_unused`` is the part of the token limit that it left."""
    return 0.5 * (str(answer) in re.findall(r"\d+", text)) + 0.5 * share_unused


class EvenTokens:
    """For models without a tokenizer: random prompts, and the share of even token ids as the reward."""

    stop_token_ids: tuple[int, ...] = (1,)

    def __init__(self, *, vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def draw(self, rng: random.Random) -> Problem:
        """Three to twenty-four random ids; lengths differ, because equal ones hide faults."""
        return Problem(
            prompt_ids=tuple(rng.randrange(2, self._vocabulary) for _ in range(rng.randint(3, 24))), answer=0
        )

    def reward(self, problem: Problem, response_ids: Sequence[int]) -> float:
        """The share of even ids."""
        return sum(token % 2 == problem.answer for token in response_ids) / max(1, len(response_ids))


def make_task(config: Config, folder: Path, *, vocabulary: int) -> Task:
    """The task that the configuration names."""
    if config.task.kind == "addition":
        return Addition(folder, max_response_tokens=config.task.max_response_tokens)
    return EvenTokens(vocabulary=vocabulary)
